"""`VerlLearner` on verl's own workers, FSDP2 and Ray, on CPU: the numbers of `TorchLearner`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import CriticValues, Gae, GroupRelative
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.base import LossCoefficients
from agentrl.algorithms.learners.factory import make_learner
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import Algo, Gate, KLPenalty
from agentrl.algorithms.objective.ratios import Clip, GivenLogProbs
from agentrl.algorithms.objective.values import ValueTerms, value_terms
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.core.config import resolve
from tests.algorithms.learners.test_learner import make_batch
from tests.algorithms.learners.verl.program import program

RANKS = (2, 1)
LIMIT = 400  # seconds for the program; 90 on two idle cores
pytestmark = [
    pytest.mark.skipif(
        find_spec("verl") is None or find_spec("ray") is None,
        reason="verl is not installed: run `make test-engines`",
    ),
    pytest.mark.timeout(LIMIT + 60),
]
HERE = Path(__file__).parent
CLOSE = 1e-5
LRS = [1e-3, 5e-3, 1e-3]
# Of weights after Adam, and of what is computed with them: Adam divides by the size of a gradient,
# so how a processor rounds one of about 0 is seen in the step. A hundredth of the largest step.
STEP = max(LRS) / 100
RUN: dict[str, Any] = {
    "algorithm": {"max_grad_norm": 0.05, "weight_decay": 0.01},
    "learner": {
        "kind": "verl",
        "token_budget": 64,  # several micro-batches on each rank
        "verl": {"attention": "sdpa"},
    },
}
GATES = (Gate(Clip(0.02, 0.03), by="row"),)
CASES = {
    # A critic that is clipped, a reference that follows, and a teacher.
    "ppo": (
        {"critic": {"model": "copy", "lr": 1e-3}, "reference": {"every": 1}},
        Algo(Gae(CriticValues()), GATES, (KLPenalty("k3", 0.1), KLPenalty("k3", 0.1, "teacher"))),
    ),
    # The reference is the model without its adapter.
    "lora": (
        {"policy": {"lora": {"rank": 4}}},
        Algo(GroupRelative("outcome"), GATES, (KLPenalty("k3", 0.1),)),
    ),
}
EACH = [(name, ranks) for name in CASES for ranks in RANKS]


def odd_batch() -> Batch:
    """Seven rows, which two ranks cannot share evenly, at two temperatures."""
    batch = make_batch(seed=3, rollouts=7)
    rows = [
        replace(row, temperature=torch.full_like(row.temperature, 0.7 if number % 2 else 1.0))
        for number, row in enumerate(batch.rows)
    ]
    return replace(batch, rows=rows)


@dataclass
class Case:
    """One batch, what the torch learner is made from, and what verl's made of it by ranks."""

    run: dict[str, Any]
    algo: Algo
    batch: Batch
    terms: objective.Terms
    values: ValueTerms | None
    folder: Path
    verl: dict[int, dict[str, Any]]

    @property
    def psi(self) -> LossCoefficients:
        return partial(objective.loss_coefficients, self.algo, self.terms)

    def learner(self) -> TorchLearner:
        """Anew from the same run file, but for the learner."""
        return torch_learner(self.run, self.algo)


def torch_learner(run: dict[str, Any], algo: Algo) -> TorchLearner:
    config = resolve(run | {"learner": {"threads": 1, "token_budget": 64}}, source="test")
    (policy,) = load_policies(config)
    learner = make_learner(config, algo, policy.model, policy.tokenizer, policy.adapters)
    assert isinstance(learner, TorchLearner)
    return learner


def learned(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.optimizer.parameters.items()}


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor], atol: float = CLOSE) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(
            theirs[name], tensor, rtol=0, atol=atol, msg=lambda found, name=name: f"{name}: {found}"
        )


def scored(learner: TorchLearner, batch: Batch) -> dict[str, Tensor]:
    asked = [of for of in ("reference", "teacher") if of in learner.supplies]
    found = {of: learner.logprobs(batch, of) for of in ("current", *asked)}  # type: ignore[arg-type]
    return found | ({"values": learner.values(batch)} if "values" in learner.supplies else {})


def made(
    name: str, more: dict[str, Any], algo: Algo, models: dict[str, Path], folder: Path
) -> Case:
    """A case, with a checkpoint of the torch learner after one step."""
    run = deepcopy(RUN) | deepcopy(more)
    run["policy"] = run.get("policy", {}) | {"model": str(models["policy"]), "device": "cpu"}
    if name == "ppo":
        run["teacher"] = {"model": str(models["teacher"])}
    learner, batch = torch_learner(run, algo), odd_batch()
    o = learner.logprobs(batch).double()
    noise = torch.linspace(-0.05, 0.05, batch.n_tokens, dtype=torch.float64)
    teacher = o - noise if name == "ppo" else None
    given = GivenLogProbs(old=o + noise, reference=o, teacher=teacher)
    advantage = torch.linspace(-1, 1, batch.n_tokens, dtype=torch.float64)
    terms = objective.loss_terms(algo, batch, given, advantage=advantage)
    values = None
    if name == "ppo":
        # Values that the second step moves further than the clip from their old selves.
        values = value_terms(2 * advantage + 0.5, learner.values(batch), clip=0.02)
    case = Case(run, algo, batch, terms, values, folder, {})
    learner.step(batch, case.psi, lr=1e-3, critic=values)
    learner.save(folder / f"torch-{name}")
    return case


@pytest.fixture(scope="module")
def cases(
    tiny_model_dir: Path, tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("verl")
    models = {"policy": tiny_model_dir, "teacher": tiny_llama_dir}
    found = {name: made(name, *case, models, folder) for name, case in CASES.items()}
    given = {
        name: {
            "run": case.run,
            "algo": case.algo,
            "batch": case.batch,
            "terms": case.terms,
            "values": case.values,
            "lrs": LRS,
            "torch_checkpoint": folder / f"torch-{name}",
        }
        for name, case in found.items()
    }
    torch.save(given, folder / "cases.pt")
    arguments = [str(folder / "cases.pt"), str(folder / "out.pt"), *map(str, RANKS)]
    program(HERE / "verl_steps.py", *arguments, limit=LIMIT)
    told = torch.load(folder / "out.pt", weights_only=False)
    for name, case in found.items():
        case.verl = told[name]
    return found


@pytest.mark.parametrize(("name", "ranks"), EACH)
def test_the_numbers_of_the_torch_learner(name: str, ranks: int, cases: dict[str, Case]) -> None:
    case = cases[name]
    found, learner = case.verl[ranks], case.learner()
    same(scored(learner, case.batch), found["scored"])
    for number, (lr, theirs) in enumerate(zip(LRS, found["steps"], strict=True)):
        close = STEP if number else CLOSE
        mine = learner.step(case.batch, case.psi, lr=lr, critic=case.values)
        report = theirs["report"]
        assert report.applied
        assert report.loss == pytest.approx(mine.loss, abs=close)
        assert report.grad_norm == pytest.approx(mine.grad_norm, abs=close)
        assert mine.grad_norm > 0.05  # so that clipping is compared as well
        torch.testing.assert_close(report.logprobs, mine.logprobs, rtol=0, atol=close)
        torch.testing.assert_close(report.entropy, mine.entropy, rtol=0, atol=close)
        for key in [key for key in mine.metrics if key.startswith("critic/")]:
            assert report.metrics[key] == pytest.approx(mine.metrics[key], abs=close), key
        same(learned(learner), theirs["weights"], atol=STEP)
    if name == "ppo":
        assert mine.metrics["critic/clip_fraction"] > 0
        learner.frozen["reference"].finish(0)
    same(scored(learner, case.batch), found["later"], atol=STEP)


@pytest.mark.parametrize(("name", "ranks"), EACH)
def test_tokens_speed_and_memory_are_told(name: str, ranks: int, cases: dict[str, Case]) -> None:
    for step in cases[name].verl[ranks]["steps"]:
        report = step["report"]
        rows = cases[name].batch.rows
        assert report.tokens == sum(int(row.actions[-1]) + 1 for row in rows)
        assert report.metrics["throughput/tflops"] > 0
        assert 0 < report.metrics["throughput/mfu"] < 1
        assert report.metrics["memory/process_peak_mb"] > 0


@pytest.mark.parametrize(("name", "ranks"), EACH)
def test_a_checkpoint_goes_on_in_either_learner(
    name: str, ranks: int, cases: dict[str, Case]
) -> None:
    case = cases[name]
    found = case.verl[ranks]
    same(found["next"]["weights"], found["again"]["weights"])
    here, there = case.learner(), case.learner()
    here.load(case.folder / f"{name}-{ranks}")
    same(scored(here, case.batch), found["later"])
    for learner, step in ((here, "next"), (there, "from_torch")):
        if step == "from_torch":
            learner.load(case.folder / f"torch-{name}")
        report = learner.step(case.batch, case.psi, lr=1e-3, critic=case.values)
        assert found[step]["report"].loss == pytest.approx(report.loss, abs=CLOSE)
        same(learned(learner), found[step]["weights"], atol=STEP)


@pytest.mark.parametrize(("name", "ranks"), EACH)
def test_a_bad_step_changes_nothing(name: str, ranks: int, cases: dict[str, Case]) -> None:
    found = cases[name].verl[ranks]
    assert len(found["bad"]) == (2 if name == "ppo" else 1)
    for bad in found["bad"]:
        assert not bad["report"].applied
        same(found["again"]["weights"], bad["weights"])


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (2, "a worker of verl failed in 'step': ValueError: no psi today"),
        (1, "verl's workers did not answer 'step' within 2 s; see Ray's logs of the workers"),
    ],
)  # fmt: skip
def test_a_broken_or_endless_step_is_one_sentence(
    ranks: int, reason: str, cases: dict[str, Case]
) -> None:
    found = cases["lora"].verl[ranks]
    assert found["errors"] == [
        f"TrainingError: {reason}",
        "TrainingError: verl's workers are stopped; start the run again",
    ]
    assert found["time"] < 60.0


def test_the_run_files_of_these_tests_are_some() -> None:
    for more, _ in CASES.values():
        assert resolve(RUN | more, source="test").learner.kind == "verl"
