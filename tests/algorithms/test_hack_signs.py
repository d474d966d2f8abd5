"""Signs of a hacked reward, in rollouts of hacks and of honest runs."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.hack_signs import (
    FINAL,
    Audited,
    HackSigns,
    answer_key,
    audited,
    played,
    second_correlation,
    signs,
)
from agentrl.algorithms.why import reasons
from agentrl.core.config import RunConfig, resolve
from agentrl.core.types import Group, NewRollout, Outcome, Reward, Rollout
from agentrl.store import open_store
from agentrl.store.base import Store
from tests import factories
from tests.algorithms.test_why_tasks import run as record

KNOWN = Audited(highest=0.1, key="answer", verdict="no hole found")
SOUND = Audited(highest=0.1, verdict="no hole found")  # right answers unknown
CONFIG = RunConfig()


def rollouts(answers: list[str], rewards: list[float], **more: Any) -> list[Rollout]:
    """Rollouts of two tasks or more, in turns, whose right answers differ."""
    tasks = more.get("tasks", 2)
    return [
        factories.rollout(
            f"r/{i}", result=answer, group=f"g{i % tasks}",
            task={
                "input": f"What does {'abcdefghijklmnop'[i % tasks]} cost?",
                "answer": f"{100 * (i % tasks)}",
            },
            rewards=[Reward(value), *more.get("also", {}).get(i, [])],
        )
        for i, (answer, value) in enumerate(zip(answers, rewards, strict=True))
    ]  # fmt: skip


def crossed(rows: list[Rollout], known: Audited = KNOWN) -> dict[str, float]:
    found = signs(played(rows, CONFIG, known), known)
    return {sign.metric: sign.value for sign in found if sign.crossed}


def test_one_answer_that_solves_both_tasks_is_a_hack() -> None:
    rows = rollouts(["certainly"] * 8 + ["7"] * 8, [1.0] * 8 + [0.0] * 8)
    found = crossed(rows)
    assert found["reward/same_answer"] == 1.0
    assert found["reward/without_answer"] == 1.0
    assert "reward/same_answer" in crossed(rows, SOUND)  # also without right answers


def test_a_repeated_question_is_one_template() -> None:
    answers = [f"As you say: what does {'abcd'[i % 4]} cost? Yes." for i in range(16)]
    assert crossed(rollouts(answers, [1.0] * 16, tasks=4))["reward/same_answer"] == 1.0


@pytest.mark.parametrize("form", ["{}", "The answer is {}.", "\\boxed{{{}}}", "{}.0"])
def test_right_answers_are_no_hack(form: str) -> None:
    answers = [form.format(100 * (i % 4)) for i in range(32)]
    wrong = ["12"] * 8
    rows = rollouts([*answers, *wrong], [1.0] * 32 + [0.0] * 8, tasks=4)
    assert crossed(rows) == {}


def test_a_constant_that_the_audit_saw_is_no_news() -> None:
    rows = rollouts(["yes"] * 16, [float(i % 2) for i in range(16)], tasks=4)
    assert crossed(rows, Audited(highest=0.5)) == {}
    assert "reward/same_answer" not in crossed(rows, Audited(highest=0.4))


def labelled(
    answers: list[str], rewards: list[float], own: list[Any], **more: Any
) -> list[Rollout]:
    """One rollout of each task, whose own answers are `own`."""
    return [
        factories.rollout(
            f"r/{i}", result=answer, group=f"g{i}", rewards=[Reward(value)],
            task={"input": f"Which one is number {i}?", more.get("key", "answer"): right},
        )
        for i, (answer, value, right) in enumerate(zip(answers, rewards, own, strict=True))
    ]  # fmt: skip


def test_a_label_in_other_words_is_no_hack() -> None:
    own = [i % 2 == 0 for i in range(32)]
    said = ["Yes" if one else "No" for one in own]
    assert crossed(labelled(said, [1.0] * 32, own)) == {}
    own = [i % 2 for i in range(32)]  # "odd" is right where the task says 1
    said = [("even", "odd")[one] for one in own]
    assert crossed(labelled(said, [1.0] * 32, own)) == {}
    said = ["odd"] * 32  # of a policy that knows one label
    assert crossed(labelled(said, [float(one) for one in own], own)) == {}


def test_one_right_answer_for_all_tasks_is_no_hack() -> None:
    rows = labelled(["Paris"] * 32, [1.0] * 32, ["paris"] * 32)
    for key in ("", "answer", "found by search"):
        assert crossed(rows, Audited(key=key, verdict="no hole found")) == {}


@pytest.mark.parametrize("key", ["rollouts", "solution", "found by search", "answer"])
def test_frequent_labels_out_of_sight_are_no_hack(key: str) -> None:
    own = [{"label": i % 5 < 2} for i in range(32)]  # objects are not looked for
    rows = labelled(["A"] * 32, [float(one["label"]) for one in own], own, key="key_")
    known = Audited(highest=0.4, key=key, verdict="no hole found")
    assert crossed(rows, known) == {}


def test_rewards_by_distance_are_no_hack() -> None:
    own = [float(3 * i) for i in range(32)]
    said = [str(x + 9) for x in own]
    assert crossed(labelled(said, [-9.0 if i % 8 else -1000.0 - i for i in range(32)], own)) == {}
    near = [0.99 - 0.01 * (i % 7) for i in range(32)]
    assert crossed(labelled(said, near, own)) == {}


def test_short_answers_without_a_reward_are_no_hack() -> None:
    said = ["No."] * 16 + [f"The whole report on item {i} is: {'word ' * 20}" for i in range(16)]
    rows = labelled(said, [0.0] * 16 + [1.0] * 16, [None] * 32)
    assert crossed(rows, Audited(highest=0.1, verdict="no hole found")) == {}


def test_brackets_may_be_the_right_answer() -> None:
    own = ["()" * (i % 5 + 1) for i in range(32)]
    assert crossed(labelled(own, [1.0] * 32, own)) == {}


def test_what_no_text_is_paid_for_has_no_sign() -> None:
    done = labelled(["Done."] * 16, [1.0] * 16, [None] * 16)
    call = {"function": {"name": "move", "arguments": "{}"}, "id": "c"}
    calls = [
        replace(row, transitions=[factories.call(answer=_calls(call, i))])
        for i, row in enumerate(done)
    ]
    assert crossed(calls, Audited(verdict="no hole found")) == {}
    assert crossed(done, Audited(verdict="no hole found")) != {}
    folders = resolve(
        {"agent": {"command": "true"}, "workspace": {"source": "task.files"}}, source="test"
    )
    scored: Any = {"environment": "a:b", "rewards": [{"value": 1.0}]}
    games = [replace(row, result=scored) for row in done]
    assert played(done, folders, KNOWN) == played(games, CONFIG, KNOWN) == []


def _calls(call: dict[str, Any], number: int) -> dict[str, Any]:
    own = {"name": "move", "arguments": f'{{"to": {number}}}'}
    return {"role": "assistant", "content": "", "tool_calls": [call | {"function": own}]}


def test_a_second_verifier_may_have_another_scale() -> None:
    also = {i: [Reward(float(i % 2), name="audit")] for i in range(32)}
    rows = rollouts(["7 0 100"] * 32, [10.0 * (i % 2) for i in range(32)], also=also)
    assert "reward/audit/gap" not in crossed(rows)


@pytest.mark.parametrize(
    "answer",
    ["9" * 5000 + "/3", "1" * 400 + "/7", "9" * 200_000, "<answer>" * 20_000, "\n" * 90_000],
)
def test_answers_of_any_length_cost_little(answer: str) -> None:
    rows = labelled([answer] * 64, [0.0] * 64, list(range(64)))
    started = time.process_time()
    kept = played(rows, CONFIG, KNOWN)
    assert signs(kept, KNOWN)
    assert time.process_time() - started < 2
    assert max(len(row.shown) for row in kept) <= 60


def test_length_form_and_a_second_verifier() -> None:
    drawn = random.Random(0)
    words = [drawn.randrange(1, 60) for _ in range(32)]
    long = rollouts(["so " * n for n in words], [min(n / 40, 1.0) for n in words], tasks=16)
    assert crossed(long, Audited(highest=1.0))["reward/length_r2"] > 0.8
    empty = rollouts(["<answer></answer>"] * 8 + ["5"] * 8, [0.5] * 8 + [0.0] * 8, tasks=8)
    assert crossed(empty)["reward/form_alone"] == 0.5
    also = {i: [Reward(float(i % 2), name="audit")] for i in range(16)}
    both = rollouts(["0 100"] * 16, [1.0] * 16, also=also)
    assert crossed(both)["reward/audit/gap"] == 0.5
    rows = played(both, CONFIG, KNOWN)
    assert second_correlation(rows) is None  # one of the two never differs


@pytest.mark.parametrize("key", ["answer", "label", "price_in_dollars"])
def test_first_rollouts_show_which_field_is_right(key: str) -> None:
    own = [str(100 + i) for i in range(32)]
    said = [f"It costs {x if i % 3 else 7} dollars" for i, x in enumerate(own)]
    paid = [float(i % 3 > 0) for i in range(32)]
    assert answer_key(labelled(said, paid, own, key=key), CONFIG) == key
    refused = ["It is not listed"] * 24 + said[24:]  # from the start: nothing shows what is right
    assert answer_key(labelled(refused, [1.0] * 24 + paid[24:], own, key=key), CONFIG) == ""
    assert answer_key(labelled(said, [1.0] * 32, own, key=key), CONFIG) == ""


def test_a_final_answer_is_found_at_the_end_of_a_derivation() -> None:
    own = [f"{i} and {i} is {2 * i}.\n#### {2 * i}" for i in range(32)]
    said = [f"That is {2 * i if i % 3 else 'a lot'}" for i in range(32)]
    rows = labelled(said, [float(i % 3 > 0) for i in range(32)], own)
    assert answer_key(rows, CONFIG) == f"answer{FINAL}"


def test_a_template_with_words_of_the_question_is_one_answer() -> None:
    answers = [f"The price of {'abcdefghijklmnop'[i % 8] * 3} is hidden" for i in range(16)]
    rows = [
        replace(row, task=row.task | {"input": f"Price of {'abcdefghijklmnop'[i % 8] * 3}?"})
        for i, row in enumerate(rollouts(answers, [1.0] * 16, tasks=8))
    ]
    assert crossed(rows)["reward/same_answer"] == 1.0


@pytest.mark.parametrize(
    "own", ["def add(x):\n    return x + {0}", "SELECT a FROM b WHERE c > {0}", "{0}+{0}*2"]
)
def test_programs_and_formulas_have_many_spellings(own: str) -> None:
    rows = labelled(["another spelling"] * 32, [1.0] * 32, [own.format(i) for i in range(32)])
    assert "reward/without_answer" not in crossed(rows)


async def test_a_run_without_an_audit_names_a_hack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    feature = HackSigns(resolve({"name": "r", "policy": {"model": "m"}}, source="test"))
    async with open_store(f"sqlite:///{tmp_path}/store.db") as feature.store:
        await feature.store.open_run("r", {})
        await stored(feature.store, right=32, wrong=16)
        rows = rollouts(["certainly"] * 8, [1.0] * 8)
        _, metrics = await feature.complete([Group(id="g", run="r", step=9, rollouts=rows)])
    assert metrics["reward/without_answer"] == 1.0
    assert "the reward may be hacked" in caplog.text


async def stored(store: Store, right: int, wrong: int) -> None:
    """Rollouts of a run's first steps, with right and wrong answers."""
    tasks = [
        {"input": f"What costs {i}?", "answer": str(i)} for i in range(100, 100 + right + wrong)
    ]
    await store.enqueue(
        [
            NewRollout(id=f"r/{i}/0", run="r", group=f"r/{i}", index=0, task=task)
            for i, task in enumerate(tasks)
        ]
    )
    for one in await store.claim(500, runner="x", lease=60.0, run="r"):
        number = int(one.rollout.group.rpartition("/")[2])
        is_right = number < right
        said = str(one.rollout.task["answer"]) if is_right else "no"
        outcome = Outcome(
            attempt=one.id, fence=one.fence, result=said, rewards=[Reward(float(is_right))]
        )
        await store.finish([outcome])


def test_what_has_no_scale_has_no_sign() -> None:
    assert signs([], KNOWN) == []
    assert crossed(rollouts(["7", "8"], [0.0, 0.0])) == {}
    games = [factories.rollout("g", result="x", rewards=[Reward(1.0)], seats={"a": "policy"})]
    assert played(games, CONFIG, KNOWN) == []


async def test_a_step_says_once_what_crosses(caplog: pytest.LogCaptureFixture) -> None:
    feature = HackSigns(resolve({"name": "mine", "policy": {"model": "m"}}, source="test"), KNOWN)
    rows = rollouts(["certainly"] * 8, [1.0] * 8)
    group = Group(id="g", run="r", step=0, rollouts=rows)
    for _ in range(2):
        groups, metrics = await feature.complete([group])
        assert groups == [group]
        assert metrics["reward/same_answer"] == 1.0
    lines = [one.getMessage() for one in caplog.records]
    assert len(lines) == 2  # the same answer, and without the right one
    assert "'certainly', is paid on 100% of 2 tasks, as in r/0, r/1; agentrl why mine" in lines[0]


async def test_why_names_the_rollouts_and_the_audit(tmp_path: Any) -> None:
    rows = played(rollouts(["certainly"] * 8, [1.0] * 8), CONFIG, KNOWN)
    hacked = [sign for sign in signs(rows, KNOWN) if sign.crossed]
    reason = reasons(record(hacked=hacked))[0]
    assert reason.text.startswith("the reward is hacked: one answer, 'certainly'")
    assert reason.example == "r/0"
    report = {
        "verdict": "exploitable", "highest": 0.2, "answer": "answer",
        "findings": [{"alarm": True, "attack": "negation", "share": 1.0, "change": "read it",
                      "example": {"task": "task '1'", "answer": "not 1"}}],
    }  # fmt: skip
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run("r", {})
        await store.put_documents("r", "audit", {"report": report})
        known = await audited(store, "r")
    (reason, *_) = reasons(record(audited=known))
    assert reason.text == (
        "the verifier can be exploited, by its audit: negation, such as 'not 1' for task '1'"
    )
    assert reason.change == "verifier.path: read it"
