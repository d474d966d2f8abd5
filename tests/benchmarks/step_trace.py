"""What a plain GRPO step executes: the library's files and functions, by tracing one.

From `Updater.update` with the claimed groups to the first gradient of a parameter, and to its end.
The updater is that of a run on the torch learner with the default settings and a small model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

import torch

from agentrl.algorithms.train import step
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.algorithms.train.stages import extend_updater, load_algorithm, make_updater
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import resolve
from agentrl.core.types import Group
from tests.benchmarks.learner import Shape, groups_of, network, rows, tokenizer
from tests.benchmarks.size import files, in_library, lines

SHAPE: Shape = (8, 4, 4, 2)
VOCABULARY = 64
RUN = {"algorithm": {"preset": "grpo"}, "policy": {"model": "-"}, "learner": {"threads": 1}}


def updater(folder: Path) -> Updater:
    """As a run builds it, of a random model."""
    config = resolve({**RUN, "output": str(folder)}, source="run.toml")
    model = network(VOCABULARY, 64, 1, torch.float32)
    loaded = LoadedModel("-", model, tokenizer(), policies=["policy"])
    made = make_updater(config, "policy", load_algorithm(config), loaded)
    return extend_updater(made, loaded, Path())


def traced(updater: Updater, groups: list[Group]) -> tuple[set[CodeType], set[CodeType]]:
    """The library's named functions up to the first gradient, and all of the step."""
    seen: set[CodeType] = set()
    before = set[CodeType]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<"):
            seen.add(code)

    def reached(_: torch.Tensor) -> None:
        before.update(seen)

    hooks = [
        parameter.register_post_accumulate_grad_hook(reached)
        for parameter in updater.learner.parameters().values()  # type: ignore[attr-defined]
    ][:1]
    sys.setprofile(note)
    try:
        updater.update(0, groups)
    finally:
        sys.setprofile(None)
        for hook in hooks:
            hook.remove()
    return set(filter(in_library, before)), set(filter(in_library, seen))


def measure() -> dict[str, int]:
    """Files and functions up to the gradient, and of the whole step; lines of the page."""
    with TemporaryDirectory() as folder:
        made = groups_of(rows(SHAPE, 2, VOCABULARY))
        to_gradient, whole = traced(updater(Path(folder)), made)
    return {
        "step_files": len(files(to_gradient)),
        "step_functions": len(to_gradient),
        "step_files_to_the_end": len(files(whole)),
        "step_functions_to_the_end": len(whole),
        "step_module_lines": lines(Path(step.__file__)),
    }
