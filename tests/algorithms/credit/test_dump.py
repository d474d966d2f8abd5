from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.algorithms.credit.dump import keep_in, load_dump, save_dump
from agentrl.algorithms.objective.core import loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets import registry
from agentrl.algorithms.train.metrics import BadSteps, Dump
from agentrl.core.errors import TrainingError
from tests.algorithms.learners.test_learner import make_batch


def make_dump() -> Dump:
    batch = make_batch()
    outcome = torch.arange(len(batch.rollouts)).double()
    outcome[-1:] = math.nan
    memory = {"ema": torch.rand(len(batch.rollouts)).double()}
    batch = dataclasses.replace(batch, rewards={"outcome": outcome}, remembered=memory)
    terms = loss_terms(registry.make("gspo+tis", {}), batch, GivenLogProbs(), fresh=True)
    return Dump(batch, terms, batch.sampler_logprobs * math.inf, loss=math.nan, grad_norm=math.inf)


def assert_equal(first: object, second: object) -> None:
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    elif dataclasses.is_dataclass(first):
        for field in dataclasses.fields(first):
            assert_equal(getattr(first, field.name), getattr(second, field.name))
    elif isinstance(first, list | dict):
        assert isinstance(second, list | dict)
        assert len(first) == len(second)
        for key in first if isinstance(first, dict) else range(len(first)):
            assert_equal(first[key], second[key])  # type: ignore[index]
    else:
        assert repr(first) == repr(second)  # NaN is NaN


def test_a_dump_comes_back_whole(tmp_path: Path) -> None:
    dump = make_dump()
    save_dump(tmp_path / "new" / "1.safetensors", dump)
    assert_equal(load_dump(tmp_path / "new" / "1.safetensors"), dump)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("nonsense")
    for path in (tmp_path / "1", tmp_path / "none"):
        with pytest.raises(TrainingError, match="not a dump of an optimizer step"):
            load_dump(path)


def test_a_dump_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "dumps").touch()
    steps = BadSteps(limit=2, keep=partial(keep_in, tmp_path / "dumps"))
    with pytest.warns(RuntimeWarning, match=r"could not be written to .*File exists"):
        steps.bad(3, 0, make_dump())
    with pytest.raises(TrainingError, match="step 5: 52 of 52 log-probs"):
        steps.bad(4, 0, make_dump())


def test_a_dump_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It named log-probs by letters."""
    made = make_dump()
    old = dataclasses.replace(
        made.terms.given, old=made.terms.sampler + 1, weight_of_current=made.terms.sampler + 2
    )
    save_dump(tmp_path / "new", dataclasses.replace(made, terms=replace(made.terms, given=old)))
    letters = {
        "logprobs/sampler": "stream/b",
        "logprobs/old": "stream/o",
        "logprobs/weight_of_current": "logprobs/current_in_old",
    }
    with safe_open(tmp_path / "new", framework="pt") as file:
        tensors = {letters.get(key, key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    assert {"stream/b", "stream/o"} <= tensors.keys()
    save_file(tensors, tmp_path / "old", metadata)
    terms = load_dump(tmp_path / "old").terms
    assert torch.equal(terms.sampler, made.terms.sampler)
    assert terms.given.computed().keys() == {"old", "weight_of_current"}
    torch.testing.assert_close(terms.given.old, made.terms.sampler + 1)
