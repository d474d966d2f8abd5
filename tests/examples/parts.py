"""An example's own modules, which have the same names in every example, and one short training."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from agentrl.core.loading import load_attribute
from tests import warm

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def modules(example: str, *names: str) -> Iterator[dict[str, ModuleType]]:
    """The modules of these names, until the end of the block."""
    folder = EXAMPLES / example
    before, key = dict(sys.modules), os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = "unused"  # clients are made where agents are imported
    try:
        for name in names:
            load_attribute(f"{name}.py:__name__", folder, key="test")
        yield {name: sys.modules[name] for name in names}
    finally:
        if key is None:
            del os.environ["OPENAI_API_KEY"]
        own = {file.stem for file in folder.glob("*.py")}
        for name in own & (sys.modules.keys() - before.keys()):
            del sys.modules[name]
        sys.path[:] = [entry for entry in sys.path if entry != str(folder)]


async def train_once(example: str, model: Path, output: Path, *more: str) -> None:
    """One step of an example from the command line, with another model and with very little of
    everything."""
    small = ["steps=1", "algorithm.groups=2", "algorithm.group_size=2", "sampling.max_tokens=4"]
    small += ["audit.before=false", "eval.tasks=1", "eval.samples=0"]
    small += [f"output={output}", f"policy.model={model}"]
    command = ["-m", "agentrl", "train", str(EXAMPLES / example / "run.toml")]
    trained = await asyncio.to_thread(warm.run, *command, *small, *more)
    assert trained.returncode == 0, trained.stderr
