"""Run as a program, because verl reads its platform once per process: three updates of one batch by
`VerlLearner`, then a save, a load and one more. Prints nothing; writes what it found by the number
of ranks.

verl_steps.py CASE OUT RANKS..."""

from __future__ import annotations

import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from agentrl.algorithms import objective
from agentrl.algorithms.learners.base import Psi
from agentrl.algorithms.learners.verl import VerlLearner
from agentrl.algorithms.learners.verl_settings import settings
from agentrl.algorithms.model import load_model
from agentrl.config import resolve
from agentrl.errors import AgentRLError


def main(case: Path, out: Path, numbers: list[int]) -> None:
    # Logical GPUs: Ray counts what it is told, and the platform of the workers is the CPU.
    ray.init(
        num_cpus=8,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        logging_level="ERROR",
    )
    given = torch.load(case, weights_only=False)
    torch.save({ranks: steps(given, ranks, out.parent) for ranks in numbers}, out)
    ray.shutdown()


def steps(given: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    batch, algo, terms = given["batch"], given["algo"], given["terms"]
    run = given["run"]
    run["learner"]["verl"]["gpus_per_node"] = ranks
    config = resolve(run, source="test")
    start = given["model"]
    model, tokenizer = load_model(start, device="cpu")
    learner = VerlLearner(model, tokenizer, settings(config, start), frozen={"q": start})
    found: dict[str, Any] = {
        "o": learner.logprobs(batch),
        "q": learner.logprobs(batch, "q"),
        "steps": [],
    }
    psi: Psi = partial(objective.psi, algo, terms)

    def step(lr: float, psi: Psi = psi) -> dict[str, Any]:
        report = learner.step(batch, psi, lr=lr)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        return {
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "logprobs": report.logprobs,
            "applied": report.applied,
            "weights": weights,
        }

    found["steps"] = [step(lr) for lr in given["lrs"]]
    learner.save(folder / f"checkpoint-{ranks}")
    found["moved_q"] = learner.logprobs(batch, "q")
    found["next"] = step(1e-3)
    learner.load(folder / f"checkpoint-{ranks}")
    found["again"] = step(1e-3)
    found["bad"] = step(1e-3, lambda p, index: torch.full_like(p, torch.nan))
    learner.load(given["torch_checkpoint"])
    found["from_torch"] = step(1e-3)

    def broken(p: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if 0 in index.tolist():  # on one rank, for which the others then wait
            raise ValueError("no psi today")
        return p

    def endless(p: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        time.sleep(60.0)
        return p

    if ranks == 1:
        learner.timeout = 2.0
    found["errors"] = []
    begun = time.monotonic()
    for _ in range(2):
        try:
            learner.step(batch, endless if ranks == 1 else broken, lr=1e-3)
        except AgentRLError as error:
            found["errors"].append(f"{type(error).__name__}: {error}")
    found["time"] = time.monotonic() - begun
    learner.close()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]), list(map(int, sys.argv[3:])))
