"""The tree rule against the obvious implementation, on random conversations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.types import NewRollout, Transition, int32
from agentrl.store import open_store
from agentrl.store.rows import digest
from agentrl.store.sql.tree import TreeNode, deepest_prefix, prefix_digests
from tests import factories
from tests.store.conftest import BACKENDS

few = st.lists(st.integers(0, 2), max_size=3)
message = st.builds(
    lambda role, n: {"role": role, "content": n}, st.sampled_from("ua"), st.integers(0, 1)
)


@dataclass
class Call:
    prompt: list[int]
    completion: list[int]
    messages: list[dict]
    answer: dict | None
    tools: list[dict] = field(default_factory=list)


Chat = list[dict]
State = tuple[list[int], Chat]  # tokens and messages so far


def said(call: Call) -> State:
    return call.prompt + call.completion, call.messages + ([call.answer] if call.answer else [])


def linear(draw: st.DrawFn, calls: list[Call]) -> State:
    """The agent sends all that was said and something new."""
    tokens, chat = said(calls[-1])
    return tokens + draw(few), chat + draw(st.lists(message, max_size=2))


def sub_agent(draw: st.DrawFn, calls: list[Call]) -> State:
    """Another agent of the same attempt begins at its own system prompt, or goes on."""
    own = [call for call in calls if call.prompt[:1] == [9]]
    if own and draw(st.booleans()):
        return linear(draw, own)
    return [9, *draw(few)], [{"role": "s", "content": 9}, draw(message)]


def best_of_n(draw: st.DrawFn, calls: list[Call]) -> State:
    """The very same request again."""
    call = draw(st.sampled_from(calls))
    return call.prompt, call.messages


def compaction(draw: st.DrawFn, calls: list[Call]) -> State:
    """What was said becomes a summary after the first message; the last words stay."""
    tokens, chat = said(calls[-1])
    summary = {"role": "s", "content": draw(st.integers(0, 1))}
    return tokens[:1] + draw(few) + tokens[-1:], [*chat[:1], summary, *chat[-1:]]


def truncation(draw: st.DrawFn, calls: list[Call]) -> State:
    """Something is cut off, at the beginning or at the end."""
    tokens, chat = said(draw(st.sampled_from(calls)))
    at, of = draw(st.integers(0, len(tokens))), draw(st.integers(0, len(chat)))
    return (tokens[at:], chat[of:]) if draw(st.booleans()) else (tokens[:at], chat[:of])


def parallel_branches(draw: st.DrawFn, calls: list[Call]) -> State:
    """Any earlier call is continued, several of them in turn."""
    return linear(draw, [draw(st.sampled_from(calls))])


SHAPES = (linear, sub_agent, best_of_n, compaction, truncation, parallel_branches)


@st.composite
def conversations(draw: st.DrawFn, shapes: tuple[Callable[..., State], ...]) -> list[Call]:
    calls = [Call([], [], [], None)]
    for _ in range(draw(st.integers(1, 9))):
        prompt, messages = draw(st.sampled_from(shapes))(draw, calls)
        calls.append(
            Call(
                prompt=prompt,
                completion=draw(few),
                messages=messages,
                answer=draw(st.none() | message),
                tools=draw(st.sampled_from([[], [{"name": "x"}], [{"name": "y"}]])),
            )
        )
    return calls[1:]


@pytest.fixture(scope="module", params=BACKENDS)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, serving: Any
) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        if request.param == "postgres":
            url = request.getfixturevalue("postgres")()
            made = Bench(url, psycopg.connect(url, autocommit=True))
        else:
            path = tmp_path_factory.mktemp("tree") / "store.db"
            url = f"sqlite:///{path}"
            if request.param == "http":
                url = stack.enter_context(serving(url))
            made = Bench(url, sqlite3.connect(path))
        yield made
        made.close()


class Bench:
    """One store for all examples; each is an attempt of its own."""

    def __init__(self, url: str, sql: Any) -> None:
        self.runner = asyncio.Runner()
        self.store = open_store(url)
        self.runner.run(self.store.open_run("run", {}))
        self.sql = sql
        self.numbers = count()

    def close(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()
        self.sql.close()

    def parents(self, attempt: str) -> list[int | None]:
        """The parent of each call, both by order of arrival."""
        where = f"where attempt_id = '{attempt}' order by seq"
        rows = self.sql.execute(f"select seq, parent from transitions {where}").fetchall()
        numbers = {seq: i for i, (seq, _) in enumerate(rows)}
        return [numbers.get(parent) for _, parent in rows]

    async def record(self, calls: list[Call], at_once: bool) -> tuple[str, list[Transition]]:
        name = str(next(self.numbers))
        rollout = NewRollout(id=name, run="run", group=name, index=0, task={})
        await self.store.enqueue([rollout])
        (attempt,) = await self.store.claim(1, runner="test", lease=3600.0)
        sent = [
            factories.call(
                f"{name}/{i}",
                call.prompt,
                call.completion,
                attempt=attempt.id,
                index=i,
                logprob=-0.25,
                messages=call.messages,
                answer=call.answer,
                tools=call.tools,
            )
            for i, call in enumerate(calls)
        ]
        for batch in [sent] if at_once else [[one] for one in sent]:
            assert all(await self.store.add_transitions(batch))
        return name, sent


def continues(calls: list[Call], i: int) -> int | None:
    """The deepest earlier call whose tokens begin the prompt, the latest of equals."""
    best, depth = None, 1
    for j in range(i):
        tokens = calls[j].prompt + calls[j].completion
        if len(tokens) >= depth and calls[i].prompt[: len(tokens)] == tokens:
            best, depth = j, len(tokens)
    return best


def shared_messages(calls: list[Call], i: int) -> int:
    """How many messages the earlier calls have already."""
    here, best = calls[i].messages, (0, 0)
    for j in range(i):
        said = calls[j].messages
        if said and here[: len(said)] == said:
            heard = calls[j].answer is not None and here[len(said) :][:1] == [calls[j].answer]
            best = max(best, (len(said), int(heard)))
    return sum(best)


@pytest.mark.parametrize("shape", [*SHAPES, None], ids=lambda shape: getattr(shape, "__name__", ""))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), at_once=st.booleans())
def test_round_trip_and_parents(
    bench: Bench, shape: Callable[..., State] | None, data: st.DataObject, at_once: bool
) -> None:
    """One shape between steps of a linear conversation, and all of them mixed."""
    calls = data.draw(conversations(SHAPES if shape is None else (linear, shape)))
    name, sent = bench.runner.run(bench.record(calls, at_once))
    trace = bench.runner.run(bench.store.trace(name))
    assert trace is not None
    assert trace.transitions == sent

    rows = bench.sql.execute(
        "select seq, parent, prompt, messages from transitions "
        f"where attempt_id = '{trace.attempt}' order by seq"
    ).fetchall()
    numbers = {row[0]: i for i, row in enumerate(rows)}
    for i, (_, parent, prompt, messages) in enumerate(rows):
        expected = continues(calls, i)
        assert numbers.get(parent) == expected
        base = [] if expected is None else calls[expected].prompt + calls[expected].completion
        assert prompt == int32(calls[i].prompt[len(base) :]).tobytes()
        assert len(json.loads(messages)) == len(calls[i].messages) - shared_messages(calls, i)


TREES = {
    "linear chat": ([([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6])], [None, 0, 1]),
    "sub-agent": (
        [([1], [2]), ([9, 8], [7]), ([9, 8, 7, 6], [5]), ([1, 2, 3], [4])],
        [None, None, 1, 0],
    ),
    "best of n": (
        [([1], [2]), ([1], [2]), ([1], [3]), ([1, 2, 4], [5]), ([1, 3, 4], [5])],
        [None, None, None, 1, 2],  # of equal samples the latest
    ),
    "compaction": ([([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 8, 5], [6])], [None, 0, None]),
    "truncation": (
        [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3], [6]), ([2, 3, 4], [5]), ([1, 2], [7])],
        [None, 0, 0, None, None],
    ),
    "parallel branches": (
        [
            ([1], [2]),
            ([1, 2, 3], [4]),
            ([1, 2, 5], [6]),
            ([1, 2, 3, 4, 7], [8]),
            ([1, 2, 5, 6], []),
        ],
        [None, 0, 0, 1, 2],
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_shapes_by_name(bench: Bench, name: str) -> None:
    pairs, parents = TREES[name]
    calls = [Call(prompt, completion, [], None) for prompt, completion in pairs]
    assert [continues(calls, i) for i in range(len(calls))] == parents
    rollout, sent = bench.runner.run(bench.record(calls, at_once=False))
    trace = bench.runner.run(bench.store.trace(rollout))
    assert trace.transitions == sent
    assert bench.parents(trace.attempt) == parents


@given(prompt=few, completion=few, n=st.integers(2, 6), at_once=st.booleans())
@settings(max_examples=20, deadline=None)
def test_samples_of_one_prompt_are_never_one(
    bench: Bench, prompt: list[int], completion: list[int], n: int, at_once: bool
) -> None:
    """However equal: the sampler drew each of them, and each is trained."""
    chat = [{"role": "u", "content": 0}]
    calls = [Call(prompt, completion, chat, {"role": "a", "content": 1}) for _ in range(n)]
    name, sent = bench.runner.run(bench.record(calls, at_once))
    trace = bench.runner.run(bench.store.trace(name))
    assert trace.transitions == sent
    assert len({call.id for call in trace.transitions}) == n


def test_branches_of_attempts_do_not_mix(bench: Bench) -> None:
    """A tree is one attempt's: another's equal prompt is no parent."""
    calls = [Call([1], [2], [], None), Call([1, 2, 3], [4], [], None)]
    bench.runner.run(bench.record(calls, at_once=False))
    name, _ = bench.runner.run(bench.record(calls[1:], at_once=False))
    trace = bench.runner.run(bench.store.trace(name))
    assert bench.parents(trace.attempt) == [None]


def test_a_long_conversation_costs_what_is_new(bench: Bench) -> None:
    calls, prompt, messages = [], [1] * 50, [{"role": "user", "content": "x" * 50}]
    for turn in range(50):
        calls.append(Call(prompt, [turn] * 10, messages, {"role": "assistant", "content": turn}))
        prompt = prompt + [turn] * 10 + [7] * 5
        messages = [*messages, calls[-1].answer, {"role": "tool", "content": "y" * 10}]
    name, _ = bench.runner.run(bench.record(calls, at_once=True))
    trace = bench.runner.run(bench.store.trace(name))
    stored = (
        "select sum(length(prompt)), sum(length(messages)) from transitions "
        f"where attempt_id = '{trace.attempt}'"
    )
    tokens, chat = bench.sql.execute(stored).fetchone()
    assert tokens == 4 * (50 + 49 * 5)
    assert chat < 50 * 100


@given(data=st.binary(max_size=40), sizes=st.lists(st.integers(0, 60)))
def test_prefixes_are_digests_of_the_beginning(data: bytes, sizes: list[int]) -> None:
    assert prefix_digests(data, sizes) == {n: digest(data[:n]) for n in sizes if n <= len(data)}


def test_deepest_is_the_first_that_fits() -> None:
    texts = [b"abcd", b"ab", b"ab", b"a"]
    nodes = [TreeNode(i, len(text), digest(text)) for i, text in enumerate(texts)]
    assert deepest_prefix(b"abc", nodes) == nodes[1]
    assert deepest_prefix(b"ax", nodes) == nodes[3]
    assert deepest_prefix(b"xyz", nodes) is None
    assert deepest_prefix(b"", nodes) is None


@given(st.binary(max_size=30), st.lists(st.binary(min_size=1, max_size=30), max_size=40))
def test_deepest_in_any_forest(data: bytes, texts: list[bytes]) -> None:
    """Also past the nodes that are looked at first."""
    texts = sorted([*texts, data[: len(data) // 2] or b"x"], key=len, reverse=True)
    nodes = [TreeNode(i, len(text), digest(text)) for i, text in enumerate(texts)]
    fits = [i for i, text in enumerate(texts) if data.startswith(text)]
    found = deepest_prefix(data, nodes)
    assert (found is None) is (not fits)
    assert found is None or found.seq == fits[0]


def test_a_linear_conversation_looks_at_one_node() -> None:
    data = bytes(100)
    nodes = iter([TreeNode(i, i, digest(data[:i])) for i in range(99, 0, -1)])
    assert deepest_prefix(data, nodes) == (99, 99, digest(data[:99]))
    assert len(list(nodes)) == 98
