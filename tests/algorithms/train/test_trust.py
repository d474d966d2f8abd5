"""Updates that move the policy too far: measured, undone and repeated at half the rate."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.learners import factory
from agentrl.algorithms.learners.auxiliary import ValueModel
from agentrl.algorithms.learners.base import LearnerDefaults, LossCoefficients, StepReport
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.presets import registry
from agentrl.algorithms.train import optimize, stages
from agentrl.algorithms.train.optimize import MAX_KL, measured_rows
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig, load, resolve
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.core.types import Group, Reward
from tests import factories


@dataclasses.dataclass
class Line(LearnerDefaults):
    """A learner whose log-probs are the sampler's plus a place, which a step moves by its rate."""

    supplies = frozenset({"old", "sampler"})

    undoable: bool = True
    place: float = 0.0
    marked: float = 0.0
    rates: list[float] = dataclasses.field(default_factory=list)
    broken: float = 0.0  # a step beyond this rate leaves log-probs that are not finite

    def logprobs(self, batch: Batch) -> Tensor:
        return batch.sampler_logprobs + self.place

    def step(self, batch: Batch, psi: LossCoefficients, *, lr: float, **rest: Any) -> StepReport:
        before = self.logprobs(batch)
        self.rates.append(lr)
        self.place += math.nan if self.broken and lr > self.broken else lr
        return StepReport(loss=0.0, grad_norm=1.0, logprobs=before, tokens=1, applied=True)

    def mark(self) -> None:
        self.marked = self.place

    def shrink(self, share: float) -> None:
        way = self.place - self.marked
        self.place = self.marked + (share * way if share else 0.0)

    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


def k3(d: float) -> float:
    return math.exp(d) - 1 - d


def group(name: str, *rewards: float, length: int = 2, logprob: float = -6.0) -> Group:
    rollouts = []
    for index, reward in enumerate(rewards):
        own, said = f"{name}/{index}", [4 + index, 5, 6, 7][:length]
        call = factories.call(own, (1, 2, 3), said, attempt=own, logprob=logprob)
        rollouts.append(
            factories.rollout(own, [call], [Reward(value=reward)], group=name, index=index)
        )
    return factories.group(*rollouts, id=name, run="r")


def updater(learner: Any, preset: str = "grpo", **settings: Any) -> Updater:
    config = RunConfig(steps=5, algorithm=AlgorithmConfig(**{"lr": 1.0, **settings}))
    supplies = frozenset({"old", "sampler", "values"})
    limit = optimize.KlLimit(learner, optimize.largest_kl(config.algorithm), config.seed)
    state = AlgorithmState(parts={optimize.STEP_SIZE: limit})
    algo = registry.make(preset, {}, supplies=supplies)
    return Updater(config, algo, learner, state=state, limit=limit)


def test_an_update_beyond_the_limit_is_redone_at_half_the_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """e^1 - 2 is .72 nats, e^.5 - 1.5 is .15, e^.25 - 1.25 is .034."""
    learner = Line()
    step = updater(learner, max_kl=0.1)
    metrics = step.update(0, [group("a", 1.0, 0.0)])
    assert learner.place == 0.25
    assert metrics["update/kl"] == pytest.approx(k3(0.25), rel=1e-5)
    assert (metrics["update/undone"], metrics["lr"], metrics["update/early_stop"]) == (2, 0.25, 0)
    (said,) = (one.getMessage() for one in caplog.records)
    assert "step 1" in said
    assert "0.718 nats per token" in said
    assert "1/4 of its learning rate" in said
    again = step.update(1, [group("a", 1.0, 0.0)])
    assert again["update/undone"] == 2  # each update begins with the whole rate
    assert learner.rates == [1.0, 1.0]
    assert len(caplog.records) == 1  # it is said once


def test_the_rate_is_lowered_until_steps_stay_within_the_limit() -> None:
    """A step that was made shorter once is chance; steps of the largest length that is allowed,
    one after the other, end a run as one that is too long does."""
    learner = Line()
    step = updater(learner, max_kl=0.1)
    moved = [step.update(n, [group("a", 1.0, 0.0)])["update/kl"] for n in range(24)]
    assert learner.rates[:2] == [1.0, 1.0]
    assert learner.rates[-1] < 0.25
    assert 0.1 / 20 < sum(moved[-12:]) / 12 < 0.1 / 8


def test_a_rate_with_which_steps_go_not_far_stays() -> None:
    learner = Line()
    step = updater(learner, lr=0.09, max_kl=0.1)
    for n in range(24):
        step.update(n, [group("a", 1.0, 0.0)])
    assert 2 * k3(0.09) < 0.1 / 10  # tokens of another policy weigh up to twice
    assert set(learner.rates) == {0.09}
    learner = Line()
    step = updater(learner, max_kl=0.0)  # nothing is undone, nothing is lowered
    for n in range(24):
        step.update(n, [group("a", 1.0, 0.0)])
    assert set(learner.rates) == {1.0}


def test_a_lowered_rate_rises_again_and_is_in_the_checkpoint() -> None:
    learner = Line()
    step = updater(learner, max_kl=0.1)
    for n in range(8):
        step.update(n, [group("a", 1.0, 0.0)])
    saved = msgspec.json.decode(msgspec.json.encode(step.state.dump()))
    other = Line()
    again = updater(other, max_kl=0.1)
    again.state.restore(saved)
    for one in (step, again):
        one.update(8, [group("a", 1.0, 0.0)])
    assert learner.rates[-1] == other.rates[-1] < 0.5
    limit = step.optimizer.limit
    for _ in range(60):
        limit.end(0.0)
    assert limit.rate == 1.0
    again.state.restore({})  # of a version that lowered nothing
    assert again.state.dump() == {"step_size": again.optimizer.limit.dump()}


def test_an_update_within_the_limit_is_measured_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    for limit, undone in ((k3(1.0) * 1.01, 0), (k3(1.0) * 0.99, 1), (0.0, 0), (None, 2)):
        learner = Line()
        metrics = updater(learner, max_kl=limit).update(0, [group("a", 1.0, 0.0)])
        assert (metrics["update/undone"], learner.place) == (undone, 0.5**undone)
        assert metrics["update/kl"] == pytest.approx(k3(0.5**undone), rel=1e-4)
    assert k3(0.25) < MAX_KL < k3(0.5)


def test_a_learner_that_undoes_nothing_is_measured() -> None:
    learner = Line(undoable=False)
    metrics = updater(learner, max_kl=0.01).update(0, [group("a", 1.0, 0.0)])
    assert learner.place == 1.0
    assert metrics["update/kl"] == pytest.approx(k3(1.0), rel=1e-5)
    assert metrics["update/undone"] == 0


def test_without_an_update_there_is_nothing_to_measure() -> None:
    metrics = updater(Line()).update(0, [group("a", 1.0, 1.0)])
    assert "update/kl" not in metrics
    assert metrics["update/undone"] == 0


def test_minibatches_are_held_together_by_the_limit() -> None:
    """The first goes half a nat; the second may not take the policy further than .6."""
    learner = Line()
    groups = [group("a", 1.0, 0.0), group("b", 0.0, 1.0)]
    step = updater(learner, lr=0.5, minibatches=2, epochs=2, max_kl=k3(0.6))
    metrics = step.update(0, groups)
    assert learner.rates == [0.5, 0.5, 0.0625, 0.03125]
    assert 0.59 < learner.place < 0.6
    assert metrics["update/kl"] == pytest.approx(k3(learner.place), rel=1e-4)
    assert metrics["update/kl"] <= k3(0.6)


def test_of_a_hopeless_update_nothing_is_left_and_the_batch_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner = Line(broken=1e-9)
    groups = [group("a", 1.0, 0.0), group("b", 0.0, 1.0)]
    metrics = updater(learner, minibatches=2, max_kl=0.1).update(0, groups)
    assert learner.place == 0.0
    assert len(learner.rates) == 1
    assert metrics["update/early_stop"] == 1
    assert metrics["update/kl"] == 0
    assert metrics["update/undone"] == optimize.MAX_HALVINGS + 1
    assert metrics["lr"] == 0  # the rate of what is left
    assert "undone and not repeated" in caplog.text


def test_an_undone_step_is_named_by_its_own_number(caplog: pytest.LogCaptureFixture) -> None:
    for planned in (0, 9):
        groups = [replace(group("a", 1.0, 0.0), step=planned)]
        updater(Line(), max_kl=0.1).update(3, groups)
        assert caplog.messages.pop().startswith("step 4: the update of policy")
        caplog.clear()


def test_the_default_limit_is_for_each_optimizer_step() -> None:
    assert optimize.largest_kl(AlgorithmConfig()) == MAX_KL
    several = AlgorithmConfig(minibatches=2, epochs=3)
    assert optimize.largest_kl(several) == pytest.approx(6 * MAX_KL)
    assert optimize.largest_kl(AlgorithmConfig(max_kl=0.1)) == 0.1
    assert optimize.largest_kl(AlgorithmConfig(max_kl=0.0)) == 0


def test_tokens_of_another_sampler_are_reweighted() -> None:
    """An outcome that the sampler never and the policy always draws, and the reverse."""

    class Fixed(Line):
        def logprobs(self, batch: Batch) -> Tensor:
            return torch.full((batch.n_tokens,), -3.0 + self.place)

    found = []
    for logprob in (-1.0, -3.0, -3.5):
        step = updater(Fixed(undoable=False), lr=0.1)
        metrics = step.update(0, [group("a", 1.0, 0.0, logprob=logprob)])
        found.append(metrics["update/kl"] / k3(0.1))
    weights = math.exp(-2.0), 1.0, math.exp(0.5)
    assert found == pytest.approx(list(weights), rel=1e-4)


def test_tokens_outside_the_loss_do_not_count() -> None:
    class OneRole(Line):
        def logprobs(self, batch: Batch) -> Tensor:
            critic = batch.roles.index("critic")
            moved = batch.transition_role[batch.token_transition] == critic
            return batch.sampler_logprobs + self.place * moved * 3

    whole = group("a", 1.0, 0.0)
    first, second = whole.rollouts
    calls = [replace(call, role="critic") for call in second.transitions]
    mixed = replace(whole, rollouts=[first, replace(second, transitions=calls)])
    for roles, moves in ((["agent"], False), (["critic"], True)):
        made = updater(OneRole(undoable=False), lr=0.1)
        algo = registry.make("grpo+only", {"only_roles": roles})
        metrics = dataclasses.replace(made, algo=algo).update(0, [mixed])
        assert (metrics["update/kl"] > 0) is moves


def torch_learner(folder: Path, **settings: Any) -> TorchLearner:
    model, tokenizer = load_model(folder, device="cpu")
    return TorchLearner(model, tokenizer, threads=1, **settings)


def moments(learner: TorchLearner) -> list[dict[str, Tensor]]:
    return list(learner.optimizer.inner.state.values())


@pytest.mark.parametrize("adapted", [False, True])
def test_a_halved_step_is_the_step_of_the_halved_rate(tiny_model_dir: Path, adapted: bool) -> None:
    """But its momentum has shrunk by the square; another adapter stays as it is."""

    def make() -> TorchLearner:
        torch.manual_seed(0)
        if not adapted:
            return torch_learner(tiny_model_dir)
        model, tokenizer = load_model(tiny_model_dir, device="cpu")
        from agentrl.algorithms.model.lora import LoraAdapters

        adapters = LoraAdapters(model)
        for name in ("policy", "other"):
            adapters.add(name, rank=4, alpha=8.0, targets=[], seed=1)
        return TorchLearner(model, tokenizer, threads=1, adapters=adapters, policy="policy")

    groups = [group("a", 1.0, 0.0), group("b", 1.0, 0.0)]
    far = 0.1 if adapted else 3e-2
    whole, halved = make(), make()
    before = {n: p.clone() for n, p in whole.model.named_parameters() if "other" in n}
    free = updater(whole, lr=far, max_kl=0.0).update(0, groups)
    limit = free["update/kl"] * 0.9
    assert limit > 0
    fresh = make()
    metrics = updater(fresh, lr=far, max_kl=limit).update(0, groups)
    assert metrics["update/undone"] >= 1
    updater(halved, lr=far / 2 ** metrics["update/undone"], max_kl=0.0).update(0, groups)
    for one, two in zip(fresh.parameters().values(), halved.parameters().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
    for one, two in zip(moments(fresh), moments(halved), strict=True):
        kept = 0.25 ** metrics["update/undone"]
        torch.testing.assert_close(one["exp_avg"], kept * two["exp_avg"])
        assert torch.equal(one["exp_avg_sq"], two["exp_avg_sq"])
    assert all(torch.equal(p, before[n]) for n, p in fresh.model.named_parameters() if n in before)


def test_a_step_that_is_not_made_leaves_every_bit(tiny_model_dir: Path) -> None:
    """Also of weights that overflowed; the next one begins without momentum."""
    learner = torch_learner(tiny_model_dir)
    groups = [group("a", 1.0, 0.0), group("b", 1.0, 0.0)]
    updater(learner, lr=1e-3, max_kl=0.0).update(0, groups)
    before = {name: p.clone() for name, p in learner.parameters().items()}
    metrics = updater(learner, lr=1e38, max_kl=0.1).update(1, groups)
    assert metrics["update/undone"] == optimize.MAX_HALVINGS + 1
    assert all(torch.equal(p, before[name]) for name, p in learner.parameters().items())
    assert not any(state["exp_avg"].any() for state in moments(learner))
    assert updater(learner, lr=1e-5).update(2, groups)["update/undone"] == 0


def test_the_critic_beside_keeps_its_step(tiny_model_dir: Path) -> None:
    kept = []
    for limit in (0.0, 1e-6):
        learner = torch_learner(tiny_model_dir)
        learner.critic = ValueModel(learner.model, lr=1e-2)
        learner.supplies |= {"values"}
        step = updater(learner, "ppo", lr=1e-2, max_kl=limit, group_size=1)
        metrics = step.update(0, [group("a", 1.0, 0.0)])
        assert (metrics["update/undone"] > 0) is bool(limit)
        kept.append(learner.critic.head.bias.detach().clone())
    assert torch.equal(*kept)
    assert kept[0].abs().sum() > 0


def test_only_a_part_of_a_large_batch_is_measured(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    learner = torch_learner(tiny_model_dir)
    step = updater(learner)
    names = [f"g{n}" for n in range(16)]
    batch = step.batch([group(name, 1.0, 0.0, length=1 + n % 4) for n, name in enumerate(names)])
    assert measured_rows(batch, "0/0", 1) is None
    monkeypatch.setattr(optimize, "MIN_MEASURED", 8)
    rows = measured_rows(batch, "0/0", 1)
    assert rows is not None
    assert 1 < len(rows) < len(batch.rows) / 4
    assert torch.equal(rows, measured_rows(batch, "0/0", 1))
    assert any(not torch.equal(rows, measured_rows(batch, f"0/{n}", 1)) for n in range(1, 9))
    assert len(measured_rows(batch, "0/0", 4)) < len(rows)
    part, tokens = batch.cut(rows)
    assert part.n_tokens == len(tokens) == sum(len(row.actions) for row in part.rows)
    torch.testing.assert_close(learner.logprobs(part), learner.logprobs(batch)[tokens])
    assert torch.equal(part.sampler_logprobs, batch.sampler_logprobs[tokens])
    assert torch.equal(part.token_rollout, batch.token_rollout[tokens])
    metrics = updater(learner, lr=1e-3).update(0, [group(name, 1.0, 0.0) for name in names])
    assert metrics["update/kl"] > 0


def test_what_cannot_be_undone_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    factories.run_folder(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from tests.algorithms.train.test_trust import Line\n"
        "def learner(config, algo, model, tokenizer, adapters, name):\n"
        "    made = Line(undoable=False)\n"
        "    made.values = made.top = made.topk_logprobs = made.logprobs\n"
        "    return made\n"
    )
    settings = ["learner.kind=mine.py:learner", "algorithm.max_kl=0.1"]
    config, algo = load(tmp_path / "run.toml", settings), registry.make("grpo", {})
    made: Any = None, None
    with pytest.raises(
        ConfigError, match=r"algorithm.max_kl: learner.kind = .* cannot undo a step"
    ):
        factory.make_learner(config, algo, *made)
    able = replace(config, algorithm=replace(config.algorithm, max_kl=None))
    factory.make_learner(able, algo, *made)


def test_a_data_set_s_tokens_are_not_the_policy_s() -> None:
    from agentrl.algorithms.preferences.collector import from_dataset
    from agentrl.core.config.learning import DataConfig

    settings = {"data": {"name": "pairs"}, "algorithm": {"max_kl": 0.1}, "policy": {"model": "x"}}
    with pytest.raises(ConfigError, match=r"algorithm.max_kl has no effect in a run on \[data\]"):
        resolve(settings, source="run.toml")
    learner = Line()
    step = updater(learner)
    config = replace(step.config, data=DataConfig(name="pairs"))
    made = from_dataset(dataclasses.replace(step, config=config))
    metrics = made.update(0, [group("a", 1.0, 0.0)])
    assert learner.place == 1.0
    assert "update/kl" not in metrics


def test_only_what_limits_steps_is_in_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever settings add to an updater."""

    def unmeasured(updater: Updater, *given: Any) -> Updater:
        return dataclasses.replace(updater, limit=None)

    def copied(updater: Updater, *given: Any) -> Updater:
        return dataclasses.replace(updater, recorder=None)

    saved = []
    for extend in (unmeasured, copied):
        made = dataclasses.replace(updater(Line(), max_kl=0.1), state=AlgorithmState())
        monkeypatch.setattr(stages, "make_updater", lambda *given, made=made: made)
        monkeypatch.setattr(stages, "extend_updater", extend)
        model: Any = SimpleNamespace(policies=["policy"])
        with ExitStack() as closing:
            stack: Any = closing
            policies = stages.make_policies(made.config, {"policy": made.algo}, [model], stack)
        saved.append(policies.dump())
    assert saved == [{}, {"step_size": {"recent": 0.0, "rate": 1.0}}]
    with pytest.raises(PolicyError, match="state 'kl' of another algorithm"):
        AlgorithmState().restore({"kl": 0.1})
