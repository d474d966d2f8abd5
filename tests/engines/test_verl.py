"""`VerlLearner` on verl's own workers, FSDP2 and Ray, on CPU: the numbers of `TorchLearner`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms import objective
from agentrl.algorithms.batch import Batch
from agentrl.algorithms.credit import Rel
from agentrl.algorithms.gates import Clip
from agentrl.algorithms.learners.base import Psi, StepReport
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model import load_model
from agentrl.algorithms.objective import Algo, Gate, Reg
from agentrl.config import resolve
from tests.algorithms.test_learner import make_batch

RANKS = (2, 1)
LIMIT = 210  # seconds for the program; 40 on two idle cores
pytestmark = [
    pytest.mark.skipif(
        find_spec("verl") is None or find_spec("ray") is None,
        reason="verl is not installed: run `make test-engines`",
    ),
    pytest.mark.timeout(LIMIT + 30),
]
HERE = Path(__file__).parent
CLOSE = 1e-5
LRS = [1e-3, 5e-3, 1e-3]
RUN = {
    "algorithm": {"max_grad_norm": 0.05, "weight_decay": 0.01},
    "learner": {
        "kind": "verl",
        "token_budget": 64,  # several micro-batches on each rank
        "verl": {"attention": "sdpa", "timeout": 90.0},
    },
}
ALGO = Algo(Rel("outcome"), (Gate(Clip(0.02, 0.03), by="row"),), (Reg("k3", 0.1),))


def odd_batch() -> Batch:
    """Seven rows, which two ranks cannot share evenly, at two temperatures."""
    batch = make_batch(seed=3, rollouts=7)
    rows = [
        replace(row, temperature=torch.full_like(row.temperature, 0.7 if number % 2 else 1.0))
        for number, row in enumerate(batch.rows)
    ]
    return replace(batch, rows=rows)


def torch_learner(model_dir: Path) -> TorchLearner:
    model, tokenizer = load_model(model_dir, device="cpu")
    return TorchLearner(model, tokenizer, max_grad_norm=0.05, weight_decay=0.01, threads=1)


def weights_of(learner: TorchLearner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=CLOSE, msg=name)


def run_steps(case: Path, out: Path) -> dict[int, dict[str, Any]]:
    """What the program found; with a time-out for it and everything that it started."""
    env = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # its FSDP engine registers for no other name
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(HERE / "verl_steps.py"), str(case), str(out)]
    command += map(str, RANKS)
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, said.decode()[-4000:]
    found: dict[int, dict[str, Any]] = torch.load(out, weights_only=False)
    return found


@dataclass(frozen=True)
class Case:
    """One batch, and what both learners made of it."""

    folder: Path
    batch: Batch
    psi: Psi
    second: StepReport  # of the torch learner, one step after its checkpoint
    weights: dict[str, torch.Tensor]  # after that
    verl: dict[int, dict[str, Any]]  # by ranks


@pytest.fixture(scope="module")
def case(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, batch = tmp_path_factory.mktemp("verl"), odd_batch()
    learner = torch_learner(tiny_model_dir)
    o = learner.logprobs(batch).double()
    noise = torch.linspace(-0.05, 0.05, batch.n_tokens, dtype=torch.float64)
    terms = objective.plan(
        ALGO, batch, {"o": o + noise, "q": o}, advantage=torch.linspace(-1, 1, batch.n_tokens)
    )
    psi: Psi = partial(objective.psi, ALGO, terms)
    learner.step(batch, psi, lr=1e-3)
    learner.save(folder / "torch")
    second = learner.step(batch, psi, lr=1e-3)
    given = {
        "batch": batch,
        "algo": ALGO,
        "terms": terms,
        "run": RUN,
        "model": str(tiny_model_dir),
        "lrs": LRS,
        "torch_checkpoint": folder / "torch",
    }
    torch.save(given, folder / "case.pt")
    found = run_steps(folder / "case.pt", folder / "out.pt")
    return Case(folder, batch, psi, second, weights_of(learner), found)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_numbers_of_the_torch_learner(ranks: int, case: Case, tiny_model_dir: Path) -> None:
    batch, psi, found = case.batch, case.psi, case.verl[ranks]
    learner = torch_learner(tiny_model_dir)
    for letter in "oq":
        torch.testing.assert_close(found[letter], learner.logprobs(batch), rtol=0, atol=CLOSE)
    for lr, theirs in zip(LRS, found["steps"], strict=True):
        mine = learner.step(batch, psi, lr=lr)
        assert theirs["applied"]
        assert theirs["loss"] == pytest.approx(mine.loss, abs=CLOSE)
        assert theirs["grad_norm"] == pytest.approx(mine.grad_norm, abs=CLOSE)
        assert mine.grad_norm > 0.05  # so that clipping is compared as well
        torch.testing.assert_close(theirs["logprobs"], mine.logprobs, rtol=0, atol=CLOSE)
        same(weights_of(learner), theirs["weights"])
    torch.testing.assert_close(found["moved_q"], found["q"], rtol=0, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_goes_on_in_either_learner(
    ranks: int, case: Case, tiny_model_dir: Path
) -> None:
    found = case.verl[ranks]
    same(found["next"]["weights"], found["again"]["weights"])
    resumed = torch_learner(tiny_model_dir)
    resumed.load(case.folder / f"checkpoint-{ranks}")
    resumed.step(case.batch, case.psi, lr=1e-3)
    same(weights_of(resumed), found["next"]["weights"])
    assert found["from_torch"]["loss"] == pytest.approx(case.second.loss, abs=CLOSE)
    same(case.weights, found["from_torch"]["weights"])


@pytest.mark.parametrize("ranks", RANKS)
def test_a_bad_step_changes_nothing(ranks: int, case: Case) -> None:
    found = case.verl[ranks]
    assert not found["bad"]["applied"]
    same(found["again"]["weights"], found["bad"]["weights"])


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (2, "a worker of verl failed in 'step': ValueError: no psi today"),
        (1, "verl's workers did not answer 'step' within learner.verl.timeout = 2 s; raise it, or "
            "see Ray's logs of the workers"),
    ],
)  # fmt: skip
def test_a_broken_or_endless_step_is_one_sentence(ranks: int, reason: str, case: Case) -> None:
    found = case.verl[ranks]
    assert found["errors"] == [
        f"TrainingError: {reason}",
        "TrainingError: verl's workers are stopped; start the run again",
    ]
    assert found["time"] < 30.0


def test_the_run_file_of_these_tests_is_one() -> None:
    assert resolve(RUN, source="test").learner.kind == "verl"
