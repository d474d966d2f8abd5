"""An example's own modules, which have the same names in every example."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from agentrl.loading import load_attribute

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
