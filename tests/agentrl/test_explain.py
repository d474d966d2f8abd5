"""The chain from reward rows to psi, and the commands that print it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoTokenizer

from agentrl.algorithms.credit.core import format_record
from agentrl.algorithms.credit.dump import CreditRecorder
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import library_presets, make
from agentrl.algorithms.train.kl_target import AdaptiveControl, KlController
from agentrl.algorithms.train.prepare import Completer, Preprocessor
from agentrl.algorithms.train.step import Updater
from agentrl.cli.main import cli
from agentrl.core.config import AlgorithmConfig, PolicyConfig, RunConfig
from agentrl.core.errors import ConfigError, StoreError, TrainingError
from agentrl.core.types import (
    Attempt,
    Group,
    PolicyVersion,
    Reward,
    RolloutState,
    Scope,
    StepCommit,
    Transition,
    float32,
)
from agentrl.explain import compared, explain, links, report
from agentrl.store import Store, open_store
from tests import factories
from tests.algorithms.train.test_update import Recorder
from tests.algorithms.worlds import EVERY_OUTPUT
from tests.factories import Register

OPTIONS = {"streams": {"outcome": {"norm": "std"}, "p": {"scope": "transition", "gate": "agree"}}}


def calls(name: str) -> list[Transition]:
    return [
        factories.call(
            f"{name}/{i}",
            range(1, 3 + 4 * i),
            [50 + i, 60],
            attempt=name,
            index=i,
            logprobs=float32([-0.5, -1.0]),
        )
        for i in range(2)
    ]


def rewards(name: str, outcome: float, process: float) -> list[Reward]:
    step = Reward(value=process, name="p", scope=Scope.TRANSITION, target=f"{name}/0", source="me")
    return [Reward(value=outcome), step]


def group() -> Group:
    rollouts = [
        factories.rollout(name, calls(name), rewards(name, 1.0 - i, 0.5), index=i, step=4)
        for i, name in enumerate(("a", "b"))
    ]  # fmt: skip
    return factories.group(*rollouts, step=4)


def test_the_versions_of_a_call_are_told() -> None:
    algo, (first, second) = make("grpo", {}), group().rollouts
    (early, late) = first.transitions
    late = msgspec.structs.replace(late, version=7, spans=[(0, 7), (1, 8)])
    first = msgspec.structs.replace(first, transitions=[early, late])
    groups = [msgspec.structs.replace(group(), rollouts=[first, second])]
    lines = report(explain(algo, groups), "a", groups, tokens=False)
    found = [line for line in lines if line.startswith("call")]
    assert found == ["call a/0, agent, 2 tokens", "call a/1, agent, 2 tokens by v7→v8@1"]


def nothing(batch: Batch) -> Tensor:
    """A credit function of the user's."""
    return torch.zeros(batch.n_tokens)


def test_the_default_is_explained_by_peers_and_its_scale() -> None:
    peers, scaled = explain(make("auto", {}), [group()]).chain
    assert (peers.depth, scaled.depth) == (1, 0)
    assert peers.text == "GroupRelative(PeerAdvantages('outcome'), base='none')"
    assert scaled.text.startswith("GrpoScale(")
    assert peers.columns["advantage"].unique().tolist() == [-1.0, 1.0]
    assert scaled.columns["advantage"].abs().tolist() == pytest.approx([0.5**0.5] * 8, rel=1e-5)


def test_every_preset_has_a_chain_that_ends_in_its_credit() -> None:
    needed = {"streams": OPTIONS, "only": {"only_roles": ["agent"]}}
    needed["process"] = {"process_streams": OPTIONS["streams"]}
    needed |= {"mean-by": {"mean_by_units": ["role"]}, "coma": {"roles": ["a"], "actions": ["b"]}}
    needed["credit"] = {"credit": f"{__name__}:nothing"}
    presets, modifiers = library_presets()
    names = [*presets, *(f"{made.host}+{name}" for name, made in modifiers.items())]
    for name in names:
        options = needed.get(name.split("+")[-1], {})
        algo = make(name, options, supplies=EVERY_OUTPUT)
        if algo.reads_critic or algo.needs_greedy or algo.remembered:
            continue
        batch = build_batch([group()], reward_names=algo.rewards)
        for column in batch.rewards.values():
            column.nan_to_num_(nan=0.25)
        last = list(links(algo.credit, batch))[-1]
        assert last.depth == 0
        assert torch.equal(
            last.columns["advantage"].nan_to_num(nan=9), algo.credit(batch).nan_to_num(nan=9)
        ), name


def test_psi_is_that_of_the_first_optimizer_step() -> None:
    algo = make("streams", OPTIONS)
    explanation = explain(algo, [group()])
    batch = build_batch([group()], reward_names=algo.rewards)
    terms = objective.loss_terms(algo, batch, GivenLogProbs(), fresh=True)
    index, sampled = torch.arange(batch.n_tokens), batch.sampler_logprobs.double()
    assert torch.equal(explanation.psi, objective.loss_coefficients(algo, terms, sampled, index))
    assert (explanation.psi != 0).any()


def test_a_report_says_where_each_number_is_from() -> None:
    algo = make("streams+tis", OPTIONS)
    groups = [group()]
    text = "\n".join(report(explain(algo, groups), "a", groups, tokens=False))
    assert text.startswith("a, step 5, streams+tis\nrewards\n  outcome = 1 (verifier)")
    assert "  transition:p of a/0 = 0.5 (me)" in text
    assert "norm='std'): value 1, baseline 0.5, scale 0.707108, advantage 0.7071" in text
    assert "value 0.5, baseline 0.5, advantage 0" in text
    expected = "0.0883882 per token (advantage 0.707106 x share of the average 0.125)"
    assert f"  weight in the loss (psi): {expected}\n" in text
    gate = "Gate(Truncate(0.0, hi=2.0), num='old', den='sampler')"
    assert f"{gate}: factor 1 where current = old = sampler" in text
    assert "token 0" not in text
    each = report(explain(algo, groups), "a", groups, tokens=True)
    spelt = report(explain(algo, groups), "a", groups, True, lambda token: f"<{token}>\n")
    assert any(line.startswith("    token 0 '<") and "\\n'" in line for line in spelt)
    assert sum("token " in line and "log-prob of the sampler" in line for line in each) == 4


def test_what_is_not_trained_says_so() -> None:
    algo = make("grpo", {})
    one = group()
    failed = msgspec.structs.replace(one.rollouts[1], state=RolloutState.FAILED, rewards=[])
    groups = [msgspec.structs.replace(one, rollouts=[one.rollouts[0], failed])]
    with pytest.raises(TrainingError, match="b is not trained: it is an evaluation, failed"):
        report(explain(algo, groups), "b", groups, tokens=False)


def test_a_record_is_printed_with_what_it_says() -> None:
    assert format_record(make("grpo", {}).credit) == "GroupRelative('outcome', norm='std')"
    assert format_record(make("rloo", {}).agg) == "Average(('row',), inner='sum')"


# -- commands --------------------------------------------------------------------------------------


def output(*arguments: str) -> str:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False).output


def test_the_catalogue_has_a_line_for_everything() -> None:
    lines = output("algorithms").splitlines()
    said = {line.split()[0] for line in lines}
    presets, modifiers = library_presets()
    assert {*presets, *(f"+{name}" for name in modifiers)} <= said
    gspo = next(line for line in lines if line.startswith("  gspo "))
    assert "arXiv 2507.18071" in gspo
    assert gspo.endswith("[credit, gates]")
    assert next(line for line in lines if "+only" in line).endswith("[filter]")


def test_the_catalogue_names_those_of_installed_packages(register: Register) -> None:
    assert "installed" not in output("algorithms").splitlines()
    register("agentrl.presets", "theirs", "no_such_module:p")  # it is not imported
    register("agentrl.presets", "+more", "no_such_module:m")
    first, *names = output("algorithms").splitlines()[-3:]
    assert first == "installed"
    assert [name.split() for name in names] == [
        ["+more", "no_such_module:m"], ["theirs", "no_such_module:p"],
    ]  # fmt: skip


def test_a_preset_prints_its_record() -> None:
    text = output("algorithms", "gspo+opsm")
    assert "Gate(Clip(0.0003, hi=0.0004), by='row')" in text
    assert "  credit       GroupRelative('outcome', norm='std')\n" in text
    assert "  needs        old, sampler\n" in text
    assert "  opsm_delta = 0.1\n" in text
    assert "  streams = (required)\n" in output("algorithms", "streams")
    with pytest.raises(ConfigError, match=r"no preset 'gsop'; did you mean 'gspo'\?"):
        output("algorithms", "gsop")


async def trained(url: str, model: Path) -> None:
    """One committed step of two rollouts."""
    config = RunConfig(name="r", steps=9, policy=PolicyConfig(model=str(model)))
    algorithm = msgspec.structs.replace(config.algorithm, preset="streams", options=OPTIONS)
    config = msgspec.structs.replace(config, algorithm=algorithm)
    async with open_store(url) as store:
        state = await store.open_run("r", msgspec.to_builtins(config))
        await store.publish(
            PolicyVersion(run="r", policy="policy", version=0, base_url="http://x/v1", model="m")
        )

        def played(attempt: Attempt) -> Any:
            made = [msgspec.structs.replace(call, attempt=attempt.id) for call in calls(attempt.id)]
            return made, {"rewards": rewards(attempt.id, 1.0 - attempt.rollout.index, 0.5)}

        await factories.play(store, factories.queue("r/g", 2), played)
        (claimed,) = await store.claim_groups("r", state.epoch, 1)
        await store.commit_step(
            StepCommit(run="r", epoch=state.epoch, step=0, groups=[claimed.id],
                       versions={"policy": 1}, checkpoint="c", metrics={"tokens/trained": 8.0})
        )  # fmt: skip


async def test_a_trained_rollout_is_explained_from_the_store(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    from agentrl.explain import explain_rollout

    url = f"sqlite:///{tmp_path / 'store.db'}"
    await trained(url, tiny_model_dir)
    lines = await explain_rollout(url, "r/g/0", tokens=True)
    text = "\n".join(lines)
    assert lines[0] == (
        "Its outcome 1 is above 0.5, the mean of the 2 of its task. Of its 2 calls the step made"
        " 2 likelier."
    )
    assert "  outcome = 1 (verifier)" in lines
    assert "advantage 0.707106" in text
    assert "it was trained" not in text
    spelt = AutoTokenizer.from_pretrained(tiny_model_dir).decode([50])
    assert any(line.startswith(f"    token 0 {spelt!r}: ") for line in lines)
    with pytest.raises(StoreError, match="there is no rollout 'r/g/7'"):
        await explain_rollout(url, "r/g/7", tokens=False)


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ((1.0, 1.0), "Its outcome is 1, as that of all 2 rollouts of its task."),
        ((0.0, 1.0), "Its outcome 0 is below 0.5, the mean of the 2 of its task."),
        ((1.0,), "Its outcome is 1, with no other of its task to compare it with."),
        ((1.0, None), "Its outcome is 1, with no other of its task to compare it with."),
        ((None, 1.0), "It has no outcome."),
    ],
)
def test_an_outcome_in_plain_words(outcomes: tuple[float | None, ...], said: str) -> None:
    rows = [
        factories.rollout(f"g/{i}", rewards=[] if x is None else [Reward(value=x)])
        for i, x in enumerate(outcomes)
    ]
    assert compared("g/0", [factories.group(*rows)]) == said


# -- from what was stored --------------------------------------------------------------------------


class Run:
    """A run whose steps are trained by a learner that records, on a store."""

    def __init__(
        self,
        store: Store,
        preset: str,
        *,
        learner: Recorder | None = None,
        completers: tuple[Completer, ...] = (),
        **settings: object,
    ) -> None:
        algorithm = AlgorithmConfig(preset=preset, **settings)  # type: ignore[arg-type]
        self.config = msgspec.structs.replace(RunConfig(name="r", steps=9), algorithm=algorithm)
        self.store, self.learner = store, learner or Recorder(shift=0.5)
        algo = make(preset, algorithm.options, supplies=("old", "sampler", "reference"))
        self.updater = Updater(
            self.config,
            algo,
            self.learner,
            AlgorithmState(algo.remembered),
            Preprocessor(completers),
            recorder=CreditRecorder(),
        )

    async def ask(self, group: str, step: int, scores: tuple[float, ...]) -> None:
        """A group of which every rollout is done, with a reward of its role as well."""

        def played(attempt: Attempt) -> Any:
            made = [msgspec.structs.replace(call, attempt=attempt.id) for call in calls(attempt.id)]
            score = scores[attempt.rollout.index]
            role = Reward(value=score, scope=Scope.ROLE, target="agent")
            return made, {"rewards": [Reward(value=score), role]}

        await factories.play(self.store, factories.queue(group, len(scores), step=step), played)

    async def train(self, step: int, n: int = 1) -> None:
        groups = await self.store.claim_groups("r", 1, n)
        metrics = self.updater.update(step, groups)
        recorder = self.updater.recorder
        await self.store.commit_step(
            StepCommit(
                run="r", epoch=1, step=step, groups=[group.id for group in groups], versions={},
                checkpoint="c", metrics=metrics, credits=recorder.stored() if recorder else [],
                rewards=self.updater.preprocessor.step_rewards,
            )
        )  # fmt: skip


@contextlib.asynccontextmanager
async def run_of(url: str, preset: str, **settings: Any) -> AsyncIterator[Run]:
    async with open_store(url) as store:
        run = Run(store, preset, **settings)
        await store.open_run("r", msgspec.to_builtins(run.config))
        yield run


async def lines_of(url: str, rollout: str) -> list[str]:
    from agentrl.explain import explain_rollout

    return await explain_rollout(url, rollout, tokens=False)


async def test_the_gates_that_applied_are_shown(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    async with run_of(url, "grpo", minibatches=2) as run:
        for group in ("a", "b"):
            await run.ask(group, 0, (1.0, 0.0))
        await run.train(0, n=2)
    first = await lines_of(url, "a/0")
    line = "  weight in the loss (psi): {} per token (advantage 0.707106 x gates {} x"
    line += " share of the average 0.125)"
    assert line.format("0.0883882", 1) in first
    assert "  as they applied in the first optimizer step that the token was in" in first
    second = await lines_of(url, "b/0")  # after the first minibatch had moved the policy
    assert line.format(0, 0) in second
    assert not any("the step used advantage" in line for line in [*first, *second])


async def test_a_baseline_of_earlier_steps_is_that_of_the_time(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    async with run_of(url, "spiral") as run:
        for step, score in enumerate((1.0, 1.0, -1.0)):
            await run.ask(f"g{step}", step, (score, score))
            await run.train(step)
    text = "\n".join(await lines_of(url, "g1/0"))
    assert "value 1, baseline 0.0975, advantage 0.9025" in text
    text = "\n".join(await lines_of(url, "g2/1"))
    assert "value -1, baseline 0.126219, advantage -1.12622" in text


async def test_the_step_that_trained_a_rollout_is_explained(tmp_path: Path) -> None:
    """With staleness the two differ, and comparisons over the whole batch with them."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    async with run_of(url, "reinforce++-baseline", max_staleness=1) as run:
        for group, step, scores in (
            ("a", 0, (1.0, 0.0)),
            ("b", 0, (1.0, 0.0)),
            ("c", 1, (9.0, 0.0)),
        ):
            await run.ask(group, step, scores)
        await run.train(0, n=1)
        await run.train(1, n=2)
    together = await lines_of(url, "b/0")
    assert not any("the step used advantage" in line for line in together)
    assert "  Whiten(): advantage 0.151" in "\n".join(together)
    text = "\n".join(await lines_of(url, "a/0"))
    assert "Whiten(): advantage 0.9" in text


async def test_a_step_without_stored_credit_says_why(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    async with run_of(url, "grpo") as run:
        await run.ask("a", 0, (1.0, 1.0))
        await run.train(0)
    last = (await lines_of(url, "a/0"))[-1]
    assert last.startswith("its step changed no weight, so it stored no credit;")


async def test_a_chain_that_does_not_lead_to_what_was_used_says_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    async with run_of(url, "grpo") as run:
        await run.ask("a", 0, (1.0, 0.0))
        await run.train(0)
        other = msgspec.structs.replace(run.config.algorithm, preset="rloo")
        config = msgspec.structs.replace(run.config, algorithm=other)
        await run.store.open_run("r", msgspec.to_builtins(config))
    text = "\n".join(await lines_of(url, "a/0"))
    assert "the step used advantage 0.7071" in text
    assert "but the chain above results in 1" in text


class Lengths:
    """Scores a call by the length of its prompt."""

    def __call__(self, calls: Sequence[Transition]) -> Tensor:
        return torch.tensor([float(len(call.prompt)) for call in calls], dtype=torch.float64)


async def test_rewards_that_the_step_gave_are_explained_like_others(tmp_path: Path) -> None:
    from agentrl.algorithms.reward_models import RewardModel

    url = f"sqlite:///{tmp_path / 'store.db'}"
    judge = RewardModel("judge", Lengths(), Scope.TRANSITION)
    options = {"streams": {"outcome": {}, "judge": {"scope": "transition"}}}
    async with run_of(url, "streams", options=options, completers=(judge,)) as run:
        await run.ask("a", 0, (1.0, 0.0))
        await run.train(0)
        (first, _) = await run.store.rollouts("r")
        assert [row.source for row in first.rewards][2:] == ["model:judge"] * 2
    lines = await lines_of(url, "a/0")
    assert any(line.startswith("  transition:judge of ") for line in lines)
    assert not any("the step used advantage" in line for line in lines)


class Referred(Recorder):
    """With a reference whose log-probs are 1 below the sampler's."""

    def logprobs(self, batch: Batch, of: str = "current") -> Tensor:
        return batch.sampler_logprobs - 1.0 if of == "reference" else super().logprobs(batch)


async def test_the_price_of_leaving_the_reference_is_that_of_the_time(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    kl = KlController(beta=0.25, target=1.0, horizon=10)  # where the run file begins with 0.01
    async with run_of(
        url, "reinforce++", options={"kl_reward": 0.01}, learner=Referred(shift=0.5)
    ) as run:
        run.updater = dataclasses.replace(run.updater, reference_control=AdaptiveControl(kl=kl))
        await run.ask("a", 0, (1.0, 0.0))
        await run.train(0)
    lines = await lines_of(url, "a/0")
    assert not any("the step used advantage" in line for line in lines)
    assert (
        "    RewardToGo('outcome', token_cost=TokenKLPenalty(0.01)): advantage 0 .. 0.25" in lines
    )


async def test_what_is_not_trained_yet_is_explained_as_it_would_be(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    async with run_of(url, "grpo") as run:
        await run.ask("a", 0, (1.0, 0.0))
    lines = await lines_of(url, "a/0")
    assert lines[-1] == "this rollout is not trained yet, or was discarded"
    assert any("psi is that of current = old = sampler" in line for line in lines)
