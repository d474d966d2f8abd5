"""`verl_steps` on one rank in this process, without Ray.

alone.py CASES OUT"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import verl_steps

from agentrl.algorithms.learners.verl import learner


class Alone:
    """`VerlWorkers` of one rank, which is here."""

    ranks = 1

    def __init__(self, settings: Any, frozen: dict[str, str]) -> None:
        from agentrl.algorithms.learners.verl.worker import PolicyWorker, check_options

        check_options(settings)
        self.worker = PolicyWorker(settings, frozen)
        self.worker.open()

    def all(self, verb: str, *arguments: Any) -> list[Any]:
        return [getattr(self.worker, verb)(*arguments)]

    def each(self, verb: str, *arguments: list[Any]) -> list[Any]:
        return self.all(verb, *(argument[0] for argument in arguments))

    def sent(self, thing: Any) -> Any:
        return thing

    def close(self) -> None:
        pass


def main(cases: Path, out: Path) -> None:
    given = torch.load(cases, weights_only=False)
    found = {
        name: {1: verl_steps.steps(case, 1, out.parent / f"{name}-1")}
        for name, case in given.items()
    }
    torch.save(found, out)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    learner.VerlWorkers = Alone  # type: ignore[assignment,misc]
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    for process in multiprocessing.active_children():
        process.kill()  # Megatron's checkpoints leave one, which would keep this one's output open
    sys.stdout.flush()
    os._exit(0)  # a process group is still there
