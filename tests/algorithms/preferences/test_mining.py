"""Data sets from stored rollouts and from files, by the commands that make them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from agentrl.cli.data import data
from agentrl.core.types import Branch, NewRollout, Outcome, Reward, Scope
from agentrl.store import Store, open_store
from agentrl.store.records import Item
from tests import factories


def command(url: Path, *words: str, fails: bool = False) -> str:
    arguments = [*words, "--store", str(url)]
    with ThreadPoolExecutor() as pool:  # it has an event loop of its own
        found = pool.submit(CliRunner().invoke, data, arguments).result()
    assert (found.exit_code != 0) is fails, found.output
    return found.output + str(found.exception or "")


async def play(
    store: Store,
    group: str,
    rollouts: dict[str, tuple[float | None, list[list[int]]]],
    run: str = "run",
    prompt: tuple[int, ...] = (1, 2),
    branches: dict[str, Branch] | None = None,
) -> None:
    """Rollouts of a group by id: their reward and the completions of their calls."""
    await store.open_run(run, {})
    asked = [
        NewRollout(
            id=id, run=run, group=group, index=i, task={"input": group},
            branch=(branches or {}).get(id),
        )
        for i, id in enumerate(rollouts)
    ]  # fmt: skip
    await store.enqueue(asked)
    for attempt in await store.claim(len(asked), runner="r", lease=60.0, run=run):
        id = attempt.rollout.id
        reward, calls = rollouts[id]
        before, made = list(prompt), []
        for index, said in enumerate(calls):
            made.append(
                factories.call(
                    f"{id}/{index}",
                    before,
                    said,
                    attempt=attempt.id,
                    index=index,
                    logprob=-0.5,
                    messages=[{"role": "user", "content": group}],
                    answer={"role": "assistant", "content": f"{said}"},
                )
            )
            before += [*said, 9]
        await store.add_transitions(made)
        rewards = [] if reward is None else [Reward(value=reward)]
        await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence, rewards=rewards)])


async def items(url: Path, name: str = "pairs") -> list[Item]:
    async with open_store(str(url)) as store:
        return await store.items(name, (await store.datasets(name))[-1].version)


def sources(found: list[Item]) -> list[str]:
    return [item.source for item in found]


@pytest.fixture
def url(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


async def test_pairs_of_rollouts(url):
    async with open_store(str(url)) as store:
        rewards = {"a": (1.0, [[5]]), "b": (0.5, [[6]]), "c": (0.0, [[7]]), "d": (None, [[8]])}
        await play(store, "g1", rewards)
        await play(store, "g2", {"e": (1.0, [[5]]), "f": (1.0, [[6]])}, prompt=(1, 3))
    said = command(url, "mine", "pairs", "--run", "run")
    assert sources(await items(url)) == ["a c"]
    assert "1 rollouts without the reward" in said
    assert "1 groups without a pair" in said
    command(url, "mine", "pairs", "--run", "run", "--how", "all", "--least", "0.5")
    assert sources(await items(url)) == ["a c", "a b", "b c"]
    command(url, "mine", "pairs", "--run", "run", "--how", "all", "--per-group", "1")
    assert sources(await items(url)) == ["a c"]
    assert "nothing to learn from" in command(
        url, "mine", "pairs", "--run", "run", "--least", "2", fails=True
    )
    assert "the store has run" in command(url, "mine", "pairs", "--run", "no", fails=True)


@pytest.mark.parametrize(
    ("how", "option"),
    [
        ("label", ("--least", "0.5")),
        ("mc", ("--per-group", "0")),
        ("demonstration", ("--least", "0.0")),
        ("extremes", ("--threshold", "0.5")),
        ("expert", ("--threshold", "0.9", "--expert", "other")),
    ],
)
async def test_an_option_without_effect_is_refused(url, how, option):
    """Also one that is given its default value."""
    async with open_store(str(url)) as store:
        await play(store, "g", {"a": (1.0, [[5]]), "b": (0.0, [[6]])})
    said = command(url, "mine", "x", "--run", "run", "--how", how, *option, fails=True)
    assert f"{option[0]} has no effect with --how {how}" in said
    async with open_store(str(url)) as store:
        assert await store.datasets("x") == []


async def test_the_same_is_found_once_and_contradictions_are_dropped(url):
    async with open_store(str(url)) as store:
        for group in ("g1", "g2"):
            await play(store, group, {f"{group}a": (1.0, [[5]]), f"{group}b": (0.0, [[6]])})
        await play(store, "g3", {"g3a": (0.0, [[7]]), "g3b": (1.0, [[8]])})
        await play(store, "g4", {"g4a": (1.0, [[7]]), "g4b": (0.0, [[8]])})
        await play(store, "g5", {"g5a": (1.0, [[4]]), "g5b": (0.0, [[4]])})
    said = command(url, "mine", "pairs", "--run", "run")
    assert sources(await items(url)) == ["g1a g1b"]
    for count in ("2 contradictions", "1 found before", "1 identical completions"):
        assert count in said
    command(url, "mine", "pairs", "--run", "run", "--conflicts", "keep")
    assert len(await items(url)) == 3


async def test_a_repeat_has_the_same_digest_and_splits_by_prompt(url):
    async with open_store(str(url)) as store:
        for k in range(30):
            sides = {f"{k}a": (1.0, [[5]]), f"{k}b": (0.0, [[6]]), f"{k}c": (0.5, [[7]])}
            await play(store, f"g{k:02}", sides, prompt=(1, 10 + k))
    mine = ("mine", "pairs", "--run", "run", "--how", "all", "--test", "0.3")
    command(url, *mine)
    command(url, *mine)
    async with open_store(str(url)) as store:
        first, second = await store.datasets("pairs")
    assert first.digest == second.digest
    splits: dict[str, set[str]] = {}
    for item in await items(url):
        splits.setdefault(item.source.split("a")[0][:-1] or item.source, set()).add(item.split)
    held = sum(item.split == "test" for item in await items(url))
    assert held % 3 == 0
    assert 3 <= held <= 45


async def test_an_expert_of_another_run(url):
    async with open_store(str(url)) as store:
        await play(store, "t", {"a": (0.0, [[5]]), "b": (1.0, [[6]])})
    async with open_store(str(url)) as store:
        await store.open_run("teacher", {})
        asked = [NewRollout(id="x", run="teacher", group="x", index=0, task={"input": "t"})]
        await factories.play(
            store,
            asked,
            lambda attempt: (
                [factories.call("x/0", [1, 2], [8], attempt=attempt.id)],
                {"rewards": [Reward(value=1.0)]},
            ),
        )
    command(url, "mine", "pairs", "--run", "run", "--how", "expert", "--expert", "teacher")
    assert sources(await items(url)) == ["x a"]
    command(
        url, "mine", "gap", "--run", "run", "--how", "expert", "--expert", "teacher",
        "--least", "1",
    )  # fmt: skip
    assert "needs --expert RUN" in command(
        url, "mine", "pairs", "--run", "run", "--how", "expert", fails=True
    )


async def test_calls_of_one_prompt_are_worth_the_mean_of_what_follows(url):
    branches = {name: Branch(rollout="a", calls=1) for name in ("b", "c", "d")}
    async with open_store(str(url)) as store:
        await play(
            store,
            "g",
            {
                "a": (1.0, [[5], [6]]),
                "b": (0.0, [[5], [7]]),
                "c": (1.0, [[5], [7]]),
                "d": (0.0, [[5], [8]]),
                "e": (0.0, [[4], [6]]),
            },
            branches=branches,
        )
    command(url, "mine", "pairs", "--run", "run", "--how", "branch")
    found = await items(url)
    assert sources(found) == ["a d", "a b", "b d"]
    assert [item.margin for item in found] == [1.0, 0.5, 0.5]
    async with open_store(str(url)) as store:
        sides = await store.sides([found[0].chosen])
    assert [list(call.completion) for call in sides[found[0].chosen]] == [[6]]
    command(url, "mine", "pairs", "--run", "run", "--how", "turn", "--least", "0.5")
    assert sources(await items(url)) == ["a e", "a d", "a b", "b d"]
    command(url, "mine", "steps", "--run", "run", "--how", "mc")
    steps = {item.source: item.steps for item in await items(url, "steps")}
    assert steps == {"a": [0.5, 1.0], "e": [0.0, 0.0]}
    command(url, "mine", "labels", "--run", "run", "--how", "label", "--threshold", "0.9")
    labels = {item.source: item.label for item in await items(url, "labels")}
    assert labels == {"a": 1.0, "b": 0.0, "d": 0.0, "e": 0.0} | (
        {"c": 1.0} if "c" in labels else {}
    )


async def test_sides_that_begin_differently_are_refused(url):
    async with open_store(str(url)) as store:
        await play(store, "g", {"a": (1.0, [[5]])}, prompt=(1, 2))
        await play(store, "t", {"b": (0.0, [[5]]), "c": (1.0, [[6]])}, prompt=(1, 3))
    assert "different prompts" not in command(url, "mine", "pairs", "--run", "run")


async def test_freeze_lets_a_prune_remove_the_rollouts(url, tmp_path):
    async with open_store(str(url)) as store:
        await play(store, "g", {"a": (1.0, [[5], [6]]), "b": (0.0, [[7]])})
        command(url, "mine", "pairs", "--run", "run")
        state = await store.run("run")
        await store.claim_groups("run", state.epoch, 1)

        await store.commit_step(factories.commit(0, ["g"], run="run", epoch=state.epoch))
        assert (await store.prune(keep_last=0)).rollouts == 0
        command(url, "mine", "pairs", "--run", "run", "--freeze")
        assert (await store.prune(keep_last=0)).rollouts == 2
    command(url, "export", "pairs", str(tmp_path / "new" / "out.jsonl"))
    (row,) = map(msgspec.json.decode, (tmp_path / "new" / "out.jsonl").read_text().splitlines())
    assert row["prompt_ids"] == [1, 2]
    assert row["chosen_ids"] == [5, 9, 6]
    assert row["rejected_ids"] == [7]
    shown = command(url, "show", "pairs")
    assert "1 pair (train)" in shown or "1 pair (test)" in shown
    assert "the better completion is the longer one in 100% of pairs" in shown
    assert "pairs version 1: 1 items" in command(url, "show")


ASK: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
SAY: list[dict[str, Any]] = [{"role": "assistant", "content": "yes"}]
NO: list[dict[str, Any]] = [{"role": "assistant", "content": "no"}]


@pytest.mark.parametrize(
    ("row", "kind", "about"),
    [
        ({"prompt": "q", "chosen": "yes", "rejected": "no"}, "pair", None),
        ({"chosen": ASK + SAY, "rejected": ASK + NO, "margin": 0.5}, "pair", 0.5),
        (
            {"prompt": ASK, "chosen": SAY, "rejected": NO, "score_chosen": 8, "score_rejected": 5},
            "pair",
            3.0,
        ),
        ({"prompt": "q", "completion": "yes", "label": True}, "label", 1.0),
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}, "steps", [1.0, 0.0]),
        (
            {
                "context": ASK,
                "completions": [{"rank": 1, "completion": NO}, {"rank": 0, "completion": SAY}],
            },
            "pair",
            None,
        ),
        ({"messages": ASK + SAY}, "demonstration", None),
        (
            {"input": "q Step 1: a ки\nStep 2: b ки", "label": "q Step 1: a +\nStep 2: b -"},
            "steps",
            [1.0, 0.0],
        ),
        (
            {
                "question": {"problem": "q"},
                "label": {"steps": [{"completions": [{"text": "a", "rating": 1}]}]},
            },
            "steps",
            [1.0],
        ),
    ],
)
async def test_the_usual_formats_are_recognised(url, tmp_path, row, kind, about):
    open_store(str(url))
    file = tmp_path / "rows.jsonl"
    file.write_bytes(msgspec.json.encode(row) + b"\n")
    command(url, "import", "pairs", str(file))
    (item,) = await items(url)
    assert item.kind == kind
    assert about in (item.margin, item.label, item.steps, None)
    async with open_store(str(url)) as store:
        calls = (await store.sides([item.chosen]))[item.chosen]
    assert len({call.id for call in calls}) == len(calls) == (len(item.steps) or 1)
    assert [call.messages for call in calls] == [ASK] * len(calls)
    call = calls[-1]  # of steps each is the answer up to the end of its step
    if len(item.steps) == 2:
        assert call.answer["content"].startswith(f"{calls[0].answer['content']}\n")
    said = {"steps": "a" if len(item.steps) == 1 else "a\nb"}.get(kind, "yes")
    if "input" in row:
        said = "Step 1: a\nStep 2: b"
    assert call.answer == {"role": "assistant", "content": said}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "columns text: no known format"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0}, "1 ties"),
        ({"chosen": "a", "rejected": "b"}, "1 rows without a prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "1 identical completions"),
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True]}, "1 rows with more or fewer"),
        ({"input": "q", "label": "q"}, "1 rows with more or fewer"),
        (["q", "a"], "rows.jsonl:1 is not a JSON object"),
        (
            {"context": "q", "completions": [{"rank": 0, "completion": word} for word in "ab"]},
            "1 ties",
        ),
    ],
)
def test_rows_that_teach_nothing_are_refused(url, tmp_path, row, message):
    open_store(str(url))
    file = tmp_path / "rows.jsonl"
    file.write_bytes(msgspec.json.encode(row) + b"\n")
    assert message in command(url, "import", "pairs", str(file), fails=True)


async def test_tools_between_answers_are_context(url, tmp_path):
    open_store(str(url))
    tool = {"role": "tool", "content": "4"}
    file = tmp_path / "rows.jsonl"
    row = {"prompt": ASK, "chosen": [*SAY, tool, *NO], "rejected": NO, "tools": "[]"}
    file.write_bytes(msgspec.json.encode(row))
    command(url, "import", "pairs", str(file))
    (item,) = await items(url)
    async with open_store(str(url)) as store:
        first, second = (await store.sides([item.chosen]))[item.chosen]
    assert second.messages == [*ASK, *SAY, tool]
    assert (first.answer, second.answer) == (SAY[0], NO[0])


async def converse(store: Store, id: str, said: list[tuple[str, list[int], float | None]]) -> None:
    """A session that a version of a live run answered: what the user said, what was answered, and
    what is said about the answer."""
    await store.open_run("run", {})
    await store.enqueue([NewRollout(id=id, run="run", group=id, index=0, task={})])
    (attempt,) = await store.claim(1, runner="r", lease=60.0, run="run")
    messages, rewards, prompt = [], [], [1]
    for index, (text, answer, value) in enumerate(said):
        messages = [*messages, {"role": "user", "content": text}]
        call = factories.call(
            f"{id}/{index}", prompt, answer, attempt=attempt.id, index=index, messages=messages,
            policy="policy@3", version=3, answer={"role": "assistant", "content": f"{answer}"},
        )  # fmt: skip
        await store.add_transitions([call])
        messages, prompt = [*messages, call.answer], [*prompt, *answer, 9]
        if value is not None:
            about = {"scope": Scope.TRANSITION, "target": call.id}
            rewards.append(Reward(name="signal", value=value, **about))
    await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence, rewards=rewards)])


async def test_the_answer_to_what_was_asked_again_beats_the_first(url):
    async with open_store(str(url)) as store:
        await converse(store, "a", [("Where?", [5], 0.0), ("No, where?", [6], 1.0)])
        await converse(store, "b", [("Where?", [5], 1.0), ("And when?", [6], 1.0)])
        await converse(store, "c", [("Where?", [5], 0.0), ("No, where?", [7], 0.0)])
    said = command(url, "mine", "pairs", "--run", "run", "--how", "reasked")
    (found,) = await items(url)
    assert found.source == "a"
    async with open_store(str(url)) as store:
        sides = await store.sides([found.chosen, found.rejected])
        (better,), (worse,) = (sides[one] for one in (found.chosen, found.rejected))
    assert [list(call.prompt) for call in (better, worse)] == [[1], [1]]
    assert [list(call.completion) for call in (better, worse)] == [[6], [5]]
    assert "2 rollouts without the reward" in said
