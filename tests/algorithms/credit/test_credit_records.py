"""What a step stores of each call, and what can be read from it again."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from agentrl.algorithms.credit.dump import CreditRecorder, baselines, call_values, read, replayed
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.types import Credit, Group, float32
from tests.algorithms.presets.test_baselines import recalled, step_of
from tests.algorithms.train.test_update import Recorder, group
from tests.algorithms.worlds import NAN


def updater(learner: Recorder, name: str = "grpo", **settings: object) -> Updater:
    config = RunConfig(steps=5, algorithm=AlgorithmConfig(lr=1.0, **settings))  # type: ignore[arg-type]
    algo = make(name, {})
    state = AlgorithmState(algo.remembered)
    return Updater(config, algo, learner, state=state, recorder=CreditRecorder())


def stored(step: Updater, groups: list[Group]) -> dict[str, Credit]:
    step.update(0, groups)
    assert step.recorder is not None
    return {credit.transition: credit for credit in step.recorder.stored()}


def test_the_numbers_of_a_call_are_those_of_its_tokens() -> None:
    credits = stored(updater(Recorder()), [group("a", 1.0, 0.0), group("b", 1.0, 0.5, None)])
    assert sorted(credits) == ["a/0", "a/1", "b/0", "b/1"]
    won = credits["a/0"]
    assert list(won.advantage) == pytest.approx([0.7071058], rel=1e-5)
    assert list(won.baseline) == [0.5]
    assert list(credits["b/1"].baseline) == [0.75]
    assert list(won.gate) == [1.0]
    assert list(won.weight) == [0.125]
    assert list(won.psi) == pytest.approx([0.7071058 / 8], rel=1e-5)


def test_what_differs_between_tokens_is_kept_for_each() -> None:
    token = torch.tensor([0, 0, 0, 1, 1, 2])
    batch = build_batch([group("a", 1.0)])
    batch = dataclasses.replace(batch, token_transition=token)
    x = torch.tensor([1.0, 1.0, 2.0, NAN, NAN, 4.0])
    y = torch.tensor([5.0, 5.0, 5.0, 6.0, 6.0, 7.0])
    assert list(map(list, call_values(batch, [y, y]))) == [[5.0, 5.0], [6.0, 6.0], [7.0, 7.0]]
    first, second, third = map(list, call_values(batch, [x, y]))
    assert first == [1.0, 1.0, 2.0, 5.0, 5.0, 5.0]
    assert len(second) == 2
    assert second[0] != second[0]
    assert third == [4.0, 7.0]
    assert list(map(list, call_values(batch, []))) == [[], [], []]


def test_gates_are_those_of_the_first_optimizer_step_of_a_token() -> None:
    groups = [group(name, 1.0, 0.0) for name in "abcd"]
    learner = Recorder(shift=0.5)  # each optimizer step moves it out of the trust region
    credits = stored(updater(learner, minibatches=2, epochs=2), groups)
    assert len(learner.batches) == 4
    gates = {name: credit.gate[0] for name, credit in credits.items()}
    assert gates["a/0"] == gates["b/1"] == 1.0
    assert gates["c/0"] == 0.0  # better, and beyond the upper bound already
    assert gates["d/1"] == pytest.approx(torch.tensor(0.5).exp().item())  # worse: no upper bound
    psi = torch.cat([torch.tensor(credits[f"{name}/0"].psi) for name in "ab"])
    assert torch.equal(psi, learner.coefficients[0][[0, 4]].float())


def test_what_a_later_step_makes_of_a_call_is_not_stored() -> None:
    """Also where it has calls that no earlier one had."""
    algo = make("grpo", {})
    part, whole = (build_batch([group(g, 1.0, 0.0) for g in names]) for names in ("a", "ab"))
    recorder = CreditRecorder()
    recorder.open(algo, whole)
    for batch, moved in ((part, 0.0), (whole, 0.5)):
        terms = objective.loss_terms(algo, batch, GivenLogProbs(old=batch.sampler_logprobs))
        recorder.record(algo, batch, terms, batch.sampler_logprobs + moved)
    assert [credit.gate[0] for credit in recorder.stored()][::2] == [1.0, 0.0]


def test_a_token_outside_of_the_loss_has_no_advantage() -> None:
    credits = stored(updater(Recorder(), "dapo"), [group("a", 1.0, 0.0), group("b", 1.0, 1.0)])
    left_out = credits["b/0"]
    assert list(left_out.weight) == [0.0]
    assert list(left_out.psi) == [0.0]
    assert left_out.advantage[0] != left_out.advantage[0]


def test_a_step_without_a_lesson_stores_nothing() -> None:
    step = updater(Recorder())
    assert len(stored(step, [group("a", 1.0, 0.0)])) == 2
    assert stored(step, [group("b", 1.0, 1.0)]) == {}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("spiral", {}),
        ("agent-r1+tabular", {}),
        ("grpo", {}),
        ("ragen", {}),
        ("reinforce++", {"kl_reward": 0.01}),
        ("ppo", {"kl_reward": 0.01}),
    ],
)
def test_what_is_stored_brings_back_what_is_not_to_be_had_again(
    name: str, options: dict[str, object]
) -> None:
    algo = make(name, options, supplies=("old", "sampler", "values", "reference"))
    state = AlgorithmState(algo.remembered)
    for number in range(3):
        batch = recalled(algo, state, step_of(7, number))
    values, drift = torch.randn(2, batch.n_tokens, dtype=torch.float64)
    batch = replace(batch, values=values, reference=batch.sampler_logprobs.double() + drift)
    recorder = CreditRecorder()
    recorder.open(algo, batch)
    read_of = algo.needs - {"sampler"}
    given = GivenLogProbs(**dict.fromkeys(read_of, batch.sampler_logprobs.double()))
    terms = objective.loss_terms(algo, batch, given, fresh=True)
    recorder.record(algo, batch, terms, batch.sampler_logprobs)
    credits = {credit.transition: credit for credit in recorder.stored()}
    bare = replace(batch, remembered={}, values=torch.empty(0), reference=torch.empty(0))
    back = read(algo, bare, credits)
    assert back.known.all()
    for was, now in zip(baselines(algo, batch), back.compared, strict=True):
        assert torch.equal(was.float(), now.float())
    assert torch.equal(back.columns["weight"].float(), terms.weight.float())
    again = replayed(algo, bare, back)
    assert torch.allclose(
        objective.compute_advantages(algo, again),
        objective.compute_advantages(algo, batch),
        atol=1e-6,
        equal_nan=True,
    )


def test_stored_credit_of_another_algorithm_is_no_baseline() -> None:
    algo, one = make("grpo", {}), float32([1.0])
    batch = recalled(algo, AlgorithmState(), step_of(8, 0))
    numbers = {"advantage": one, "gate": one, "weight": one, "psi": one}
    of_five = Credit(transition="", policy="policy", baseline=float32([1.0] * 5), **numbers)
    back = read(algo, batch, dict.fromkeys(batch.transitions, of_five))
    assert back.known.all()
    assert all(x.isnan().all() for x in back.compared)


# -- the step --------------------------------------------------------------------------------------


def test_a_step_killed_before_its_commit_is_repeated_alike() -> None:
    """The process that comes next begins with the state of the last checkpoint."""
    learner = Recorder()
    step = updater(learner, "spiral")
    step.update(0, step_of(9, 0))
    checkpoint = step.state.dump()
    step.update(1, step_of(9, 1))  # and killed
    assert step.state.dump() != checkpoint
    again = updater(Recorder(), "spiral")
    again.state.restore(checkpoint)
    metrics = again.update(1, step_of(9, 1))
    assert torch.equal(again.learner.coefficients[0], learner.coefficients[1])  # type: ignore[attr-defined]
    assert again.state.dump() == step.state.dump()
    assert metrics["update/skipped"] == 0


def test_a_step_without_groups_is_skipped() -> None:
    """As happens where dynamic sampling found nothing to learn from."""
    step = updater(Recorder(), "spiral")
    metrics = step.update(0, [])
    assert (metrics["update/skipped"], metrics["rollouts"]) == (1, 0)


def test_minibatches_have_the_credit_of_the_whole() -> None:
    whole, cut = updater(Recorder(), "spiral"), updater(Recorder(), "spiral", minibatches=3)
    one, other = stored(whole, step_of(9, 0)), stored(cut, step_of(9, 0))
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one]
    assert all(a.advantage == b.advantage or a.advantage[0] != a.advantage[0] for a, b in pairs)
    assert all(a.baseline == b.baseline for a, b in pairs)
