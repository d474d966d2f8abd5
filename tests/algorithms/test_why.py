"""Real runs of a tiny model, each spoiled in one way, and what `agentrl why` says first of each."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from agentrl.algorithms import run_record as records
from agentrl.algorithms import verdict, why
from agentrl.algorithms.run_record import PolicyRun
from agentrl.algorithms.train import main
from agentrl.algorithms.verdict import HELD_OUT, TRAINING, Change
from agentrl.algorithms.why import Reason
from agentrl.cli.main import cli
from agentrl.core.config import resolve
from agentrl.core.errors import NotFound, TrainingError
from agentrl.core.types import EMPTY, LOOPS, ErrorKind, Failure, FailureCount, Purpose, Reward
from agentrl.runners.gateway import response
from agentrl.runners.main import RunnerThread
from agentrl.store import open_store
from agentrl.store.records import Found
from tests import factories
from tests.factories import play, queue, rollout

Agent = Callable[[str], Awaitable[str]]
LONG = "and so on " * 400


def build(text: Callable[[str], str] = str, pause: float = 0.0) -> Agent:
    """An agent that asks its model once and says what it answered."""

    async def agent(task: str) -> str:
        await asyncio.sleep(pause)
        messages = [{"role": "user", "content": text(task)}]
        body = {"model": "policy", "messages": messages}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        async with httpx.AsyncClient(verify=False) as client:  # certificates take long to read
            answer = await client.post(url, json=body)
        if answer.is_error:
            raise ValueError(answer.text)
        return str(answer.json()["choices"][0]["message"]["content"] or "")

    return agent


def early_letters(task: dict[str, Any], result: str) -> float:
    """The share of letters up to m: no two rollouts agree, and it can be learned."""
    return sum(letter in "abcdefghijklm" for letter in result) / (len(result) or 1)


def by_task(task: dict[str, Any], result: str) -> float:
    return float(task["input"] == "one")


def seldom(task: dict[str, Any], result: str) -> dict[str, float]:
    return {"outcome": early_letters(task, result)} if "a" in result else {"style": 1.0}


SPOILED: dict[str, tuple[str, dict[str, Any]]] = {
    "groups flat": ("groups are flat", {"verify": by_task}),
    "rewards missing": ("rewards are missing", {"verify": seldom}),
    "verifier always 0": ("the verifier gives one reward", {"verify": lambda task, result: 0.0}),
    "calls inexact": ("calls are inexact", {}),
    "model certain": ("entropy is gone", {}),
    "prompt too long": ("the prompt is too long", {"agent": build(lambda task: LONG)}),
    "agent times out": (
        "rollouts fail",
        {"agent": build(pause=9.0), "settings": {"agent": {"timeout": 0.05}}},
    ),
    "role misspelt": (
        "a role is silent",
        {
            "settings": {
                "policies": {
                    "solver": {"roles": ["agent"], "lora": {"rank": 2}},
                    "planner": {"roles": ["planer"], "lora": {"rank": 2}},
                }
            }
        },
    ),
    "lr too high": ("the learning rate is too high", {"algorithm": {"lr": 1.0}}),
    "lr too high, unlimited": (
        "the learning rate is too high",
        {"algorithm": {"lr": 1.0, "max_kl": 0.0}},
    ),
    "lr too low": ("the learning rate is too low", {"algorithm": {"lr": 1e-8}}),
    "too many epochs": (
        "ratios are clipped",
        {"algorithm": {"lr": 1e-2, "minibatches": 2, "epochs": 4}},
    ),
    "lag": (
        "the lag is too high",
        {"algorithm": {"lr": 3e-2, "preset": "grpo+tis", "max_staleness": 4.0, "max_kl": 0.0}},
    ),
}


async def train(
    folder: Path,
    model: Path,
    *,
    agent: Agent | None = None,
    verify: Callable[..., Any] = early_letters,
    settings: dict[str, Any] | None = None,
    **tables: dict[str, Any],
) -> str:
    """A run of a few steps in this process; returns the URL of its store."""
    (folder / "tasks.jsonl").write_text('{"input": "one"}\n{"input": "two"}\n')
    given: dict[str, Any] = {
        "name": "r", "root": str(folder), "output": str(folder / "out"), "steps": 4,
        "agent": {"path": "agent.py:agent"}, "tasks": {"train": "tasks.jsonl"},
        "policy": {"model": str(model), "device": "cpu"}, "learner": {"threads": 1},
    } | (settings or {})  # fmt: skip
    given["algorithm"] = {"groups": 2, "group_size": 5, "lr": 1e-3} | tables.get("algorithm", {})
    given["sampling"] = {"max_tokens": 4} | tables.get("sampling", {})
    config = resolve(given, source="test")
    runner = RunnerThread(config.store, "r", agent=agent or build(), verifier=verify)
    runner.start()
    try:
        async with asyncio.timeout(60):
            await main.run(config)
    except TrainingError:  # no rollout of three steps could be used
        pass
    finally:
        await asyncio.to_thread(runner.stop)
    return config.store


def make_certain(model: Path, folder: Path) -> Path:
    """A copy that gives its likeliest token a probability of almost 1."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 500.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", SPOILED)
async def test_what_spoiled_a_run_is_named_first(
    name: str, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, spoiled = SPOILED[name]
    model = tiny_model_dir
    if name == "calls inexact":
        monkeypatch.setattr(response.SampledChoice, "exact", property(lambda choice: False))
    if name == "model certain":
        model = make_certain(model, tmp_path / "certain")
    async with open_store(await train(tmp_path, model, **spoiled)) as store:
        *_, record = (await records.read(store, "r")).values()
    found = why.reasons(record)
    assert expected in found[0].text, found


async def test_a_run_that_learns_has_no_strong_reason_not_to(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    url = await train(tmp_path, tiny_model_dir, algorithm={"lr": 1e-2}, sampling={"max_tokens": 3})
    async with open_store(url) as store:
        (record,) = (await records.read(store, "r")).values()
    assert [reason for reason in why.reasons(record) if reason.share >= why.RANKED_SHARE] == []


def test_the_command_prints_reasons_and_settings(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"

    async def fill() -> None:
        config = resolve({"policy": {"model": "m"}}, source="test")
        async with open_store(url) as store:
            state = await store.open_run("r", msgspec.to_builtins(config))
            for step in range(2):
                metrics = {"reward/mean": 0.0, "reward/std": 0.0, "rollouts": 4.0}
                commit = factories.commit(step, epoch=state.epoch, metrics=metrics)
                await store.commit_step(commit)

    asyncio.run(fill())
    said = CliRunner().invoke(cli, ["why", "r", "--store", url]).output
    assert "1. the verifier gives one reward to all: 0.0% in all 2 steps\n" in said
    assert "   change verifier.path" in said
    lost = CliRunner().invoke(cli, ["why", "other", "--store", url])
    assert isinstance(lost.exception, NotFound)


def test_the_command_says_that_a_run_improved(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"

    async def fill() -> None:
        config = resolve({"policy": {"model": "m"}}, source="test")
        async with open_store(url) as store:
            await store.open_run("r", msgspec.to_builtins(config))
            for step, score in enumerate((0.2, 0.76)):
                metrics = {
                    "eval/sampled": score, "eval/sampled_low": score - 0.1,
                    "eval/sampled_high": score + 0.1, "eval/score": 0.5,
                }  # fmt: skip
                await store.log("r", step, metrics)

    asyncio.run(fill())
    said = CliRunner().invoke(cli, ["why", "r", "--store", url]).output
    expected = (
        "held-out 50.0% to 50.0% (+0.0 points), sampled held-out 20.0% to 76.0% (+56.0 points, of"
        " which chance explains 17.7 points)"
    )
    expected = f"(0 steps; means of the first and last fifth: {expected})"
    assert said == f"It learned.\n{expected}\n"


def test_what_is_the_same_of_two_policies_is_printed_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    policies = {one: {"roles": [one], "lora": {"rank": 4}} for one in ("planner", "solver")}

    async def fill() -> None:
        config = resolve({"policy": {"model": "m"}, "policies": policies}, source="test")
        async with open_store(url) as store:
            await store.open_run("r", msgspec.to_builtins(config))
            for step, score in enumerate((0.2, 0.76)):
                ends = {"eval/score_low": score - 0.1, "eval/score_high": score + 0.1}
                await store.log("r", step, {"eval/score": score, **ends})

    asyncio.run(fill())
    said = CliRunner().invoke(cli, ["why", "r", "--store", url]).output
    assert said.count("means of the first and last fifth") == 1
    for policy in policies:  # what differs is said of each
        assert (
            f"{policy}: It learned, but:\n1. a role is silent: no call was made in {policy}" in said
        )


def changed(first: float, last: float, noise: float) -> dict[str, Change]:
    return {HELD_OUT: Change(first, last, max(first, last), noise)}


RISEN_ALONE = {HELD_OUT: Change(0.5, 0.5, 0.5, 0.1), TRAINING: Change(0.3, 0.6, 0.6, 0.16)}


@pytest.mark.parametrize(
    ("steps", "measured", "reasons", "said"),
    [
        (5, changed(0.3, 0.1, 0.4), 0, "It is too early to say: no difference is larger than"),
        (5, changed(0.3, 0.5, 0.4), 1, "It has not learned so far; the most likely reasons:"),
        (100, changed(0.3, 0.5, 0.4), 0, "No difference is larger than chance."),
        (100, changed(0.3, 0.5, 0.4), 1, "It did not learn; the most likely reasons:"),
        (100, changed(0.7, 0.1, 0.2), 1, "It got worse; the most likely reasons:"),
        (9, changed(0.1, 0.7, 0.2), 0, "It learned."),
        (9, changed(0.1, 0.7, 0.2), 1, "It learned, but:"),
        (100, RISEN_ALONE, 0, "Training reward rose, held-out did not."),
        (9, RISEN_ALONE, 1, "Training reward rose, held-out did not; the most likely reasons:"),
        (0, {}, 0, "No step is trained yet."),
        (0, {}, 1, "No step is trained yet; the most likely reasons:"),
    ],
)
def test_the_first_sentence_is_the_verdict(
    steps: int, measured: dict[str, Change], reasons: int, said: str
) -> None:
    """What chance explains is neither learning nor decay."""
    step = {"update/steps": 1.0, "reward/std": 0.5, "lr": 1e-3}
    run = record([step] * steps, measured)
    assert why.opening(run, [Reason(1.0, "x", "y")] * reasons).startswith(said)
    if steps == 5:  # a larger model is for later
        assert all(one.change.startswith("nothing yet: ") for one in why.reasons(run))


async def test_equal_outcomes_of_few_tasks_are_no_certainty(tmp_path: Path) -> None:
    """Paired they have no scatter; what chance explains is then that of their interval."""
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("r", {})
        for step in (0, 5):
            group = f"r/eval/{step:06d}/score"
            asked = [replace(new, task={"i": new.index}) for new in queue(group, 4)]
            asked = [replace(new, purpose=Purpose.EVAL) for new in asked]
            await play(store, asked, lambda _: ([], {"rewards": [Reward(value=0.0)]}))
        measured = changed(0.0, 0.0, 0.43)
        found = await verdict.paired(store, "r", measured, {HELD_OUT: [0, 5]})
    assert found == measured


async def test_why_reads_the_evaluation_of_the_last_start(tmp_path: Path) -> None:
    """Before the first step there may be some of which every rollout failed."""
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("r", {})
        for name in ("score", "score.01", "score.02"):
            await store.enqueue(queue(f"r/eval/000000/{name}", purpose=Purpose.EVAL))
        found = await verdict.evaluation(store, "r", 0, "score")
        assert [row.id for row in found] == ["r/eval/000000/score.02/0"]
        assert await verdict.evaluation(store, "r", 5, "score") == []


@pytest.mark.parametrize(("cursor", "silent"), [("3.7", []), (None, ["planer"])])
async def test_a_search_that_ran_out_of_time_finds_no_silent_role(
    cursor: str | None, silent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = {"planner": {"roles": ["planer"], "lora": {"rank": 2}}}
    config = resolve({"policy": {"model": "m"}, "policies": team}, source="test")
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("r", msgspec.to_builtins(config))

        async def search(*args: Any, **given: Any) -> Found:
            return Found([], cursor, 9)

        monkeypatch.setattr(store, "search", search)
        (found,) = (await records.read(store, "r")).values()
    assert found.silent == silent


@pytest.mark.parametrize(
    ("held_out", "named"), [([0.1, 0.2], True), ([0.1, 0.9], False), ([], False)]
)
def test_a_run_that_learns_its_training_tasks_alone(held_out: list[float], named: bool) -> None:
    record = PolicyRun(
        config=resolve({"policy": {"model": "m"}}, source="test"),
        steps=[{"reward/mean": 0.1 * step, "lr": 1e-3, "update/steps": 1.0} for step in range(9)],
        scores=held_out, failure=None, silent=[], logprobs=[-1.0],
    )  # fmt: skip
    texts = [reason.text for reason in why.reasons(record)]
    expected = (
        "training rises, held-out does not as much: 10.0% to 70.0% in training, 10.0% to 20.0% "
        "held-out"
    )
    assert texts == [expected] * named


@pytest.mark.parametrize(("sampled", "named"), [(-0.001, True), (-2.5, False)])
def test_an_update_after_which_no_group_differs_any_more(sampled: float, named: bool) -> None:
    """Later steps change no weight and measure no entropy: what is sampled shows what it left."""
    record = PolicyRun(
        config=resolve({"policy": {"model": "m"}}, source="test"),
        steps=[{"policy/entropy": 3.0, "lr": 1.0, "update/steps": 1.0}, {"update/steps": 1.0}],
        scores=[], failure=None, silent=[], logprobs=[sampled],
    )  # fmt: skip
    reasons = [reason for reason in why.reasons(record) if reason.share == 1.0]
    assert any("the learning rate is too high" in reason.text for reason in reasons) == named


NAMES = {
    "score": "eval/score", "sampled": "eval/sampled", "common": "eval/common",
    "reward": "reward/mean", "games": "selfplay/games",
}  # fmt: skip


def rows(**columns: list[float]) -> list[dict[str, float]]:
    return [
        {NAMES[key]: x for key, x in zip(columns, row, strict=True)}
        for row in zip(*columns.values(), strict=True)
    ]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"score": [0.1, 0.2]}, ""),
        ({"score": [0.2, 0.2], "reward": [0.0, 1.0]}, "held-out 20.0% to 20.0%"),
        ({"score": [0.2, 0.2], "sampled": [0.2, 0.76]}, ""),
        ({"score": [0.2, 0.3], "common": [0.2, 0.1]}, "held-out 20.0% to 10.0%"),
        ({"score": [-1.0, -1.5]}, "held-out -1.000 to -1.500"),  # no share: as on the console
        ({"score": [1.0, 1.0]}, ""),
        ({"reward": [0.1, 0.2, 0.3, 0.4, 0.5]}, ""),
        ({"reward": [0.5, 0.1, 0.5, 0.1, 0.1]}, ""),  # nobody has evaluated it
        ({"reward": [0.0, 0.0, 0.0], "games": [1.0, 1.0, 1.0]}, ""),
        ({"reward": [0.1]}, ""),
    ],
)
def test_whether_a_run_improved(columns: dict[str, list[float]], sentence: str) -> None:
    expected = f"no improvement was measured ({sentence})" if sentence else ""
    assert verdict.not_improved(rows(**columns)) == expected


def test_a_run_that_lost_what_it_had_gained_is_reported_as_worse() -> None:
    """Though its last score is above its first one."""
    said = verdict.not_improved(bounded(0.1, 0.9, 0.3))
    assert said.startswith("it got worse (held-out 10.0% to 30.0%, at best 90.0%, where chance")


@pytest.mark.parametrize(
    "settings", [{"tasks": {"order": "difficulty"}}, {"data": {"name": "d"}, "steps": 1}]
)
def test_a_reward_of_chosen_or_recorded_rollouts_is_no_evidence(settings: dict[str, Any]) -> None:
    config = resolve(settings, source="test")
    assert verdict.not_improved(rows(reward=[0.5, 0.5])) == ""
    assert verdict.changes_of(rows(reward=[0.1, 0.9]), config) == {}


def bounded(*scores: float, half: float = 0.1) -> list[dict[str, float]]:
    return [
        {"eval/score": x, "eval/score_low": x - half, "eval/score_high": x + half} for x in scores
    ]


@pytest.mark.parametrize(
    ("measured", "risen"),
    [
        (bounded(0.55, 0.8, 1.0), True),
        (bounded(0.55, 0.6), False),  # may be chance
        (bounded(0.2, 0.3, 0.9, 0.8, 0.3), False),  # lost most of it again
        (rows(score=[0.0, 1.0]), False),  # of an unknown number of tasks
        ([{"reward/mean": x, "reward/std": 0.5, "groups": 8.0} for x in (0.1, 0.2)], False),
        ([{"reward/mean": x / 100, "reward/std": 0.5, "groups": 8.0} for x in range(99)], True),
    ],
)
def test_a_run_has_clearly_improved(measured: list[dict[str, float]], risen: bool) -> None:
    found = verdict.changes_of(measured, resolve({}, source="test"))
    assert any(change.risen for change in found.values()) == risen


def record(
    steps: list[dict[str, float]], changed: dict[str, Change] | None = None, **given: Any
) -> PolicyRun:
    given = {"scores": [], "failure": None, "silent": [], "logprobs": []} | given
    config = resolve({"policy": {"model": "m"}}, source="test")
    return PolicyRun(config=config, steps=steps, changes=changed or {}, **given)


def test_symptoms_of_success_are_no_reason_if_a_run_improved() -> None:
    steps = [
        {
            "policy/entropy": entropy, "policy/clip_fraction": 0.3, "update/steps": 1.0, "lr": 1e-7,
            "reward/outcome/frac_zero_std": 0.8, "reward/outcome/frac_missing": 0.0,
            "reward/role:plan/frac_missing": 1.0, "rollouts": 8.0, "rollouts/usable": 8.0,
        }
        for entropy in (2.0, 0.1)
    ]  # fmt: skip
    found = why.reasons(record(steps, logprobs=[-0.001]))
    said = " ".join(reason.text for reason in found)
    for effect in ("learning rate is too high", "entropy", "flat", "clipped", "rate is too low"):
        assert effect in said
    assert "missing" not in said  # one role's process reward is
    risen = {HELD_OUT: Change(0.55, 1.0, 1.0, 0.2)}
    assert why.reasons(record(steps, risen, logprobs=[-0.001])) == []
    lost = [step | {"rollouts/failed": 4.0, "rollouts/failed/timeout": 4.0} for step in steps]
    failure = FailureCount(kind=ErrorKind.TIMEOUT, attempts=8, rollout="r/1", message="late")
    (reason,) = why.reasons(record(lost, risen, failure=failure))
    assert reason.text == "rollouts fail: 50%, as r/1: timeout, late"
    assert reason.change == "agent.timeout: more"


def test_an_agent_that_asks_until_it_gets_a_form_is_named() -> None:
    steps = [{"rollouts": 4.0, "rollouts/failed": 4.0, "rollouts/failed/limit": 3.0}]
    message = f"the agent made more than agent.max_calls = 9 model calls; 9 in a row {LOOPS}"
    failure = FailureCount(kind=ErrorKind.LIMIT, attempts=4, rollout="r/1", message=message)
    (reason,) = why.reasons(record(steps, failure=failure))
    assert reason.text.startswith("the agent loops: 75% of rollouts ended at agent.max_calls")
    assert "warmup.data" in reason.change


@pytest.mark.parametrize("kind", [*ErrorKind])
def test_failures_name_the_settings_of_their_own_kind(kind: ErrorKind) -> None:
    steps = [{"rollouts": 4.0, "rollouts/failed": 4.0, f"rollouts/failed/{kind}": 4.0}]
    failure = FailureCount(kind=kind, attempts=4, rollout="r/1", message="it broke")
    (reason,) = why.reasons(record(steps, failure=failure))
    assert ("agent.timeout" in reason.change) == (kind is ErrorKind.TIMEOUT)
    assert ("agent.max_calls" in reason.change) == (kind is ErrorKind.LIMIT)
    assert ("verifier.path" in reason.change) == (kind is ErrorKind.VERIFIER)


@pytest.mark.parametrize(
    ("kind", "message", "said"),
    [
        (ErrorKind.NO_CALL, "no call", "the agent makes no call at the gateway in 75%"),
        (ErrorKind.AGENT, "KeyError: 'x'", "rollouts fail: 75%, as r/1: agent_error, KeyError"),
        (ErrorKind.MODEL, "the model's context is 9 tokens", "the prompt is too long: 75%"),
    ],
)
def test_a_run_that_its_first_evaluation_ended_has_a_reason(
    kind: ErrorKind, message: str, said: str
) -> None:
    failed = Failure(kind=kind, message=message)
    heldout = [rollout(f"r/{i}", failure=failed if i else None) for i in range(4)]
    failure = FailureCount(kind=kind, attempts=3, rollout="r/1", message=message)
    reason, *_ = why.reasons(record([], failure=failure, heldout=heldout))
    assert reason.text.startswith(said)


def test_a_missing_outcome_is_counted_and_shown() -> None:
    steps = [
        {"reward/outcome/frac_missing": share, "rollouts/usable": 8.0, "rollouts": 10.0}
        for share in (0.5, 0.25)
    ]
    reason, *_ = why.reasons(record(steps))
    assert reason.text == "rewards are missing: 6 of 16 rollouts have no 'outcome'"
    lost = [
        rollout("r/1"),
        rollout("r/2", rewards=[Reward(value=1.0)]),
        rollout("r/3", rewards=[Reward(value=math.nan)]),
    ]
    style = rollout("r/4", rewards=[Reward(value=1.0, name="style")])
    reason, *_ = why.reasons(record([{}], newest=[*lost, style]))
    expected = "rewards are missing: 3 of the last 4 rollouts have no 'outcome', for example r/1"
    assert (reason.text, reason.share) == (expected, 0.75)
    unused = record([{EMPTY: 8.0, "rollouts": 8.0, "rollouts/failed": 2.0}])
    (reason,) = why.reasons(unused)
    assert "missing" not in reason.text
    assert reason.text.startswith("75% of the rollouts did not fail and could not be trained")


def test_groups_are_not_flat_if_another_reward_differs() -> None:
    flat = {"reward/outcome/frac_zero_std": 1.0, "advantage/std": 0.0}
    (reason,) = why.reasons(record([flat]))
    assert "groups are flat: in 100%" in reason.text
    process = {"reward/style/frac_zero_std": 0.1, "reward/style/frac_missing": 0.0}
    assert why.reasons(record([flat | process])) == []
    role = {"reward/role:plan/frac_zero_std": 0.0, "reward/role:plan/frac_missing": 1.0}
    assert len(why.reasons(record([flat | role]))) == 1
    assert why.reasons(record([flat | {"advantage/std": 0.3}])) == []  # a critic


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("This model's maximum context length is 4096 tokens.", True),
        ("'code': 'context_length_exceeded'", True),
        ("the model's context is 64 tokens, and the prompt of 70 tokens leaves no room", True),
        ("prompt is too long: 210000 tokens > 200000 maximum", True),
        ("'NoneType' object does not support the context manager protocol", False),
        ("SSLContext: certificate verify failed", False),
    ],
)
def test_only_a_context_that_is_full_makes_a_prompt_too_long(message: str, named: bool) -> None:
    failure = FailureCount(kind=ErrorKind.AGENT, attempts=8, rollout="r/1", message=message)
    steps = [{"rollouts": 8.0, "rollouts/failed": 4.0, "rollouts/failed/agent_error": 4.0}]
    (first, *_) = why.reasons(record(steps, failure=failure))
    assert ("the prompt is too long: 50%" in first.text) == named


@pytest.mark.parametrize(
    ("share", "low", "high"), [(0.02, 0.0, 1.0), (0.06, 0.0, 1.0), (0.05, -1.0, 3.0)]
)
def test_rare_success_needs_demonstrations_or_easier_tasks(
    share: float, low: float, high: float
) -> None:
    newest = [rollout(rewards=[Reward(x)]) for x in [low] * 15 + [high]]
    step = rewards_of(share, low, high) | {"reward/outcome/frac_zero_std": 0.8}
    (reason,) = why.reasons(record([step], newest=newest))
    assert f"success is rare: {share:.1%} of the rollouts" in reason.text
    assert "demonstrations" in reason.change
    assert "easier" in reason.change
    assert "group_size" not in reason.change


@pytest.mark.parametrize(("share", "low", "high"), [(0.3, 0.0, 1.0), (0.95, -1.0, 3.0)])
def test_flat_groups_of_a_policy_with_successes_are_made_larger(
    share: float, low: float, high: float
) -> None:
    newest = [rollout(rewards=[Reward(x)]) for x in [low, high]]
    step = rewards_of(share, low, high) | {"reward/outcome/frac_zero_std": 0.8}
    (reason,) = why.reasons(record([step], newest=newest))
    assert "rare" not in reason.text
    assert "group_size: more" in reason.change


def test_a_step_without_rewards_says_nothing_of_successes() -> None:
    newest = [rollout(rewards=[Reward(x)]) for x in (0.0, 1.0)]
    flat = {"reward/outcome/frac_zero_std": 0.8}
    steps = [rewards_of(0.15, 0.0, 1.0) | flat, flat, flat]
    (reason,) = why.reasons(record(steps, newest=newest))
    assert "rare" not in reason.text


def rewards_of(share: float, low: float, high: float) -> dict[str, float]:
    """The metrics of rewards of which this share is `high`, the others `low`."""
    mean = low + share * (high - low)
    std = (high - low) * math.sqrt(share * (1 - share))
    return {"reward/mean": mean, "reward/std": std}


def test_another_held_out_reward_is_no_constant_verifier() -> None:
    steps = [{"reward/mean": 0.0, "reward/std": 0.0}] * 3
    assert "one reward to all" in why.reasons(record(steps, scores=[0.0]))[0].text
    assert why.reasons(record(steps, scores=[0.0, 0.4])) == []


def test_held_out_that_rises_as_much_as_training_is_no_fault() -> None:
    steps = [{"reward/mean": x} for x in (0.1, 0.4, 0.7)] * 3
    rising = [{"reward/mean": 0.1}, *steps[-1:] * 8]
    assert why.reasons(record(rising, scores=[0.0, 0.4])) == []
    (reason,) = why.reasons(record(rising, scores=[0.2, 0.1]))
    assert "held-out does not as much" in reason.text
    known = {TRAINING: Change(0.1, 0.6, 0.7, noise=0.1)}
    known[HELD_OUT] = Change(0.3, 0.2, 0.3, noise=0.9)  # which the difference of gains is within
    assert why.reasons(record(rising, known, scores=[0.2, 0.1])) == []
    known[HELD_OUT] = Change(0.3, 0.2, 0.3, noise=0.2)
    (reason,) = why.reasons(record(rising, known, scores=[0.2, 0.1]))
    assert (
        "10.0% to 60.0% in training, 30.0% to 20.0% held-out" in reason.text
    )  # as `agentrl why` says
    chance = {TRAINING: Change(0.1, 0.7, 0.7, noise=1.0)}
    assert why.reasons(record(rising, chance, scores=[0.2, 0.1])) == []


def test_why_reads_the_run_of_a_folder(tmp_path: Path) -> None:
    async def fill(*runs: str) -> None:
        async with open_store(f"sqlite:///{tmp_path / 'out' / 'store.db'}") as store:
            for run in runs:
                await store.open_run(run, msgspec.to_builtins(resolve({}, source="test")))

    (tmp_path / "out").mkdir()
    asyncio.run(fill("r"))
    assert CliRunner().invoke(cli, ["why", str(tmp_path / "out")]).output.startswith("No step is")
    asyncio.run(fill("other"))
    two = CliRunner().invoke(cli, ["why", str(tmp_path)]).exception
    assert str(two).endswith("has 2 runs: name one, of other, r")
