"""Tokens of older versions: what is refused, withheld and corrected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import old_policy_share
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.metrics import ratio_metrics
from agentrl.algorithms.train.stages import load_algorithm
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig, resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import Group
from tests.algorithms.train.test_update import Recorder, group


def aged(found: Group, *versions: int, spans: Any = ()) -> Group:
    """The group with the versions of its rollouts' only calls, the last with spans."""
    rows = []
    for row, version in zip(found.rollouts, versions, strict=True):
        more = [*spans] if row is found.rollouts[-1] else []
        calls = [replace(call, version=version, spans=more) for call in row.transitions]
        rows.append(replace(row, transitions=calls))
    return replace(found, rollouts=rows)


def update(step: int, *groups: Group, preset: str = "grpo+tis", **settings: Any) -> tuple[Any, Any]:
    learner, options = Recorder(), settings.pop("options", {})
    config = RunConfig(steps=9, algorithm=AlgorithmConfig(lr=1.0, **settings))
    measured = Updater(config, make(preset, options), learner).update(step, [*groups])
    return learner, measured


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "cispo"}, r"max_staleness = 0.5: 'cispo' does not read .* add \+tis"),
        ({"preset": "opo"}, r"'opo' does not read the sampler's log-probs"),
        ({"preset": "reinforce+behaviour"}, r"\+behaviour changes token ratios"),
        ({"preset": "dppo-topk+behaviour"}, "most probable tokens, of which"),
        ({"preset": "grpo+behaviour+tis"}, r"correct for the sampler twice"),
    ],
)  # fmt: skip
def test_what_is_blind_to_older_versions_is_refused(settings: Any, message: str) -> None:
    config = resolve({"algorithm": {"max_staleness": 0.5} | settings}, source="test")
    with pytest.raises(ConfigError, match=message):
        load_algorithm(config)


@pytest.mark.parametrize("preset", ["grpo+tis", "scalerl", "dppo-tv", "minirl", "cispo+behaviour"])
def test_what_reads_the_sampler_may_be_stale(preset: str) -> None:
    load_algorithm(resolve({"algorithm": {"max_staleness": 8, "preset": preset}}, source="test"))


def test_a_critic_of_the_present_version_is_refused() -> None:
    tables = {"algorithm": {"max_staleness": 1, "preset": "ppo+tis"}, "critic": {"model": "shared"}}
    with pytest.raises(ConfigError, match=r"'ppo\+tis' compares returns of older versions"):
        load_algorithm(resolve(tables, source="test"))


def test_a_withheld_token_still_moves_the_baseline() -> None:
    fresh, old = group("a", 1.0, 0.0, 0.0), aged(group("a", 1.0, 0.0, 0.0), 4, 4, 1)
    whole, _ = update(4, aged(fresh, 4, 4, 4), max_staleness=2)
    learner, _ = update(4, old, max_staleness=2)
    assert (learner.coefficients[0][4:] == 0).all()
    part, _ = update(4, aged(group("a", 1.0, 0.0), 4, 4), max_staleness=2)
    before, after, alone = (x.coefficients[0][:4] for x in (whole, learner, part))
    assert torch.allclose(after / after[0], before / before[0])  # the baseline of three rewards
    assert not torch.allclose(after / after[0], alone / alone[0])
    bound, _ = update(3, old, max_staleness=2)
    assert (bound.coefficients[0] != 0).all()
    mixed, _ = update(4, aged(group("a", 1.0, 0.0), 4, 1, spans=[(0, 1), (1, 2)]), max_staleness=2)
    assert (mixed.coefficients[0] == 0).tolist() == [False, False, True, False]


def test_explain_tells_what_was_withheld() -> None:
    from agentrl.explain import explain

    found = aged(group("a", 1.0, 0.0), 4, 1)
    weight = explain(make("grpo+tis", {}), [found], oldest=2).weight
    assert (weight > 0).tolist() == [True, True, False, False]


def test_the_behaviour_ratio_is_clipped_against_the_sampler() -> None:
    batch = build_batch([group("a", 1.0, 0.0)])
    p = batch.sampler_logprobs.double() + torch.tensor([0.5, 0.1, 0.1, -0.5])
    index = torch.arange(batch.n_tokens)
    found = []
    for preset in ("grpo", "grpo+behaviour"):
        algo = make(preset, {})
        terms = objective.loss_terms(algo, batch, GivenLogProbs(old=p))
        found.append(objective.loss_coefficients(algo, terms, p, index))
    assert (found[0] != 0).all()  # p is the old policy
    assert (found[1] == 0).tolist() == [True, False, False, True]


def test_the_old_policy_is_interpolated_by_versions() -> None:
    batch = build_batch([aged(group("a", 1.0, 0.0), 4, 1, spans=[(0, 1), (1, 3)])])
    share = old_policy_share(batch.lag(4))
    assert share.tolist() == pytest.approx([1, 1, 2 / 3, 0])
    algo = make("grpo+decoupled", {"decoupled_old": "versions"})
    terms = objective.loss_terms(algo, batch, GivenLogProbs(weight_of_current=share), fresh=True)
    p = batch.sampler_logprobs.double() + 0.3
    o = objective.logprobs_at(terms, p, torch.arange(4)).old
    assert (o - batch.sampler_logprobs).tolist() == pytest.approx([0.3, 0.3, 0.2, 0.0])


def test_the_old_policy_is_not_computed_where_versions_tell_it() -> None:
    options = {"decoupled_old": "versions"}
    found = aged(group("a", 1.0, 0.0), 0, 0)
    learner, _ = update(0, found, preset="grpo+decoupled", options=options, epochs=2)
    exact, _ = update(0, found, preset="grpo+decoupled", epochs=2)
    assert [batch.n_tokens for batch in learner.batches] == [4, 4]
    assert torch.equal(learner.coefficients[0], exact.coefficients[0])  # at lag 0


def test_metrics_by_lag() -> None:
    batch, algo = build_batch([aged(group("a", 1.0, 0.0), 4, 0)]), make("grpo+tis", {})
    terms = objective.loss_terms(algo, batch, GivenLogProbs(), fresh=True)
    p = batch.sampler_logprobs + torch.tensor([0.0, 0.0, 0.5, 0.0])
    found = ratio_metrics(algo, terms, p, batch.lag(5))
    assert found["sampler/lag_1/ess"] == 1
    assert found["sampler/lag_4/ess"] < 1
    assert found["sampler/lag_4/ratio_max"] == pytest.approx(torch.tensor(0.5).exp().item())
    assert "sampler/lag_0/ess" not in found
    assert not any("lag" in name for name in ratio_metrics(algo, terms, p, batch.lag(4) * 0))
