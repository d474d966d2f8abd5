"""`VerlLearner` on verl's Megatron engine, in float32 on CPU: the numbers of `TorchLearner`."""

from __future__ import annotations

import socket
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.learners.verl.learner import VerlLearner
from agentrl.algorithms.objective.core import Algo, KLPenalty
from agentrl.core.errors import PolicyError
from tests.algorithms.learners.verl.program import program
from tests.algorithms.learners.verl.test_verl import (
    CLOSE,
    GATES,
    HERE,
    LIMIT,
    LRS,
    STEP,
    Case,
    learned,
    made,
    same,
    scored,
)

pytestmark = [
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("verl", "ray", "megatron", "mbridge")),
        reason="Megatron-Core or verl is not installed: run `make test-engines`",
    ),
    pytest.mark.timeout(LIMIT + 60),
]
# What of Megatron's is written for GPUs alone.
PLAIN = {
    "use_cpu_initialization": True,
    "attention_backend": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
ENGINE = {
    "strategy": "megatron",
    "vanilla_mbridge": True,
    "sequence_parallel": False,
    "override_transformer_config": PLAIN,
}
ALGO = Algo(GroupRelative("outcome"), GATES, (KLPenalty("k3", 0.1),))


@pytest.fixture(scope="module")
def case(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One rank, without Ray."""
    folder = tmp_path_factory.mktemp("megatron")
    # Megatron decays no norms.
    more: dict[str, Any] = {"algorithm": {"max_grad_norm": 0.05, "weight_decay": 0.0}}
    case = made("megatron", more, ALGO, {"policy": tiny_model_dir}, folder)
    run = deepcopy(case.run)
    run["learner"]["verl"]["options"] = {"engine": ENGINE}
    given = {"run": run, "algo": ALGO, "batch": case.batch, "terms": case.terms, "values": None}
    torch.save({"megatron": given | {"lrs": LRS}}, folder / "cases.pt")
    program(
        HERE / "alone.py",
        *(str(folder / "cases.pt"), str(folder / "out.pt")),
        limit=LIMIT,
        VERL_USE_EXTERNAL_MODULES="verl_cpu,megatron_cpu",
        TORCHDYNAMO_DISABLE="1",  # its fused functions are computed as they are written
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    case.verl = torch.load(folder / "out.pt", weights_only=False)["megatron"]
    return case


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_the_numbers_of_the_torch_learner(case: Case) -> None:
    found, learner = case.verl[1], case.learner()
    same(scored(learner, case.batch), found["scored"])
    for number, (lr, theirs) in enumerate(zip(LRS, found["steps"], strict=True)):
        close = STEP if number else CLOSE
        mine = learner.step(case.batch, case.psi, lr=lr)
        report = theirs["report"]
        assert report.applied
        assert report.loss == pytest.approx(mine.loss, abs=close)
        assert report.grad_norm == pytest.approx(mine.grad_norm, abs=close)
        assert mine.grad_norm > 0.05  # so that clipping is compared as well
        torch.testing.assert_close(report.logprobs, mine.logprobs, rtol=0, atol=close)
        torch.testing.assert_close(report.entropy, mine.entropy, rtol=0, atol=close)
        same(learned(learner), theirs["weights"], atol=STEP)
    same(scored(learner, case.batch), found["later"], atol=STEP)


def test_a_checkpoint_goes_on_and_a_bad_step_changes_nothing(case: Case) -> None:
    found = case.verl[1]
    same(found["next"]["weights"], found["again"]["weights"])
    (bad,) = found["bad"]
    assert not bad["report"].applied
    same(found["again"]["weights"], bad["weights"])


def test_the_policy_of_a_checkpoint_is_a_model_directory(case: Case) -> None:
    weights = case.learner().read_policy(case.folder / "megatron-1")
    last = case.verl[1]["steps"][-1]["weights"]
    same(last, {name: weights[name] for name in last})


def test_a_checkpoint_of_another_engine_is_refused(tmp_path: Path) -> None:
    learner: Any = object.__new__(VerlLearner)
    learner.strategy = "megatron"
    with pytest.raises(PolicyError, match="has no optimizer of verl's engine 'megatron'; resume"):
        learner.load(tmp_path)
