"""Run as a program, because verl reads its platform once per process: updates of one batch by
`VerlLearner`, a save, a load and more of them. Prints nothing; writes what it found by case and
number of ranks.

verl_steps.py CASES OUT RANKS..."""

from __future__ import annotations

import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.base import LossCoefficients
from agentrl.algorithms.learners.factory import make_learner
from agentrl.algorithms.learners.verl.learner import VerlLearner
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.core.config import resolve
from agentrl.core.errors import AgentRLError


def main(cases: Path, out: Path, numbers: list[int]) -> None:
    # Logical GPUs: Ray counts what it is told, and the platform of the workers is the CPU.
    ray.init(
        num_cpus=8,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        logging_level="ERROR",
    )
    given = torch.load(cases, weights_only=False)
    found = {
        name: {ranks: steps(case, ranks, out.parent / f"{name}-{ranks}") for ranks in numbers}
        for name, case in given.items()
    }
    torch.save(found, out)
    ray.shutdown()


def opened(case: dict[str, Any], ranks: int) -> VerlLearner:
    """As a run opens it."""
    run = case["run"]
    run["learner"]["verl"]["gpus_per_node"] = ranks
    config = resolve(run, source="test")
    (policy,) = load_policies(config)
    learner = make_learner(config, case["algo"], policy.model, policy.tokenizer, policy.adapters)
    assert isinstance(learner, VerlLearner)
    return learner


def steps(case: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    batch, values, learner = case["batch"], case["values"], opened(case, ranks)
    psi: LossCoefficients = partial(objective.loss_coefficients, case["algo"], case["terms"])
    found: dict[str, Any] = {"scored": scored(learner, batch)}

    def step(
        lr: float, psi: LossCoefficients = psi, values: ValueTerms | None = values
    ) -> dict[str, Any]:
        report = learner.step(batch, psi, lr=lr, critic=values)
        weights = {name: p.detach().clone() for name, p in learner.parameters().items()}
        return {"report": report, "weights": weights}

    found["steps"] = [step(lr) for lr in case["lrs"]]
    if "reference" in learner.frozen:
        learner.frozen["reference"].finish(0)
    found["later"] = scored(learner, batch)
    learner.save(folder)
    found["next"] = step(1e-3)
    learner.load(folder)
    found["again"] = step(1e-3)
    found["bad"] = [step(1e-3, lambda p, index: torch.full_like(p, torch.nan))]
    if values is not None:
        found["bad"].append(step(1e-3, values=bad_values(values)))
    if "torch_checkpoint" in case:
        learner.load(case["torch_checkpoint"])
        found["from_torch"] = step(1e-3)
        found["errors"], found["time"] = broken(learner, batch, endless=ranks == 1)
    learner.close()
    return found


def scored(learner: VerlLearner, batch: Batch) -> dict[str, Tensor]:
    """What it says of the batch, by model; the policy last, as in a step."""
    asked = [of for of in ("reference", "teacher") if of in learner.supplies]
    found = {of: learner.logprobs(batch, of) for of in (*asked, "current")}
    return found | ({"values": learner.values(batch)} if "values" in learner.supplies else {})


def bad_values(values: ValueTerms) -> ValueTerms:
    returns = values.returns.clone()
    returns[0] = torch.nan  # on one rank, and only the critic learns it
    return ValueTerms(returns=returns, old=values.old, weight=values.weight, clip=values.clip)


def broken(learner: VerlLearner, batch: Batch, endless: bool) -> tuple[list[str], float]:
    """What is said of a step that does not end, or that fails on one rank."""

    def fails(p: Tensor, index: Tensor) -> Tensor:
        if 0 in index.tolist():  # on one rank, for which the others then wait
            raise ValueError("no psi today")
        return p

    def sleeps(p: Tensor, index: Tensor) -> Tensor:
        time.sleep(60.0)
        return p

    if endless:
        learner.workers.timeout = 2.0
    errors = []
    begun = time.monotonic()
    for _ in range(2):
        try:
            learner.step(batch, sleeps if endless else fails, lr=1e-3)
        except AgentRLError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors, time.monotonic() - begun


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]), list(map(int, sys.argv[3:])))
