"""Branches end to end: a real client, the gateway, the embedded server, the store, the credit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from statistics import fmean
from typing import Any

import openai
import pytest

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.objective.core import compute_advantages
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.sampling.replays import replay_metrics
from agentrl.core.config import resolve
from agentrl.core.types import RolloutState, Transition
from agentrl.store import open_store
from tests.algorithms.sampling.killed import RunnerSide, sampled

TURNS, SIZE, WIDTH = 3, 3, 2
SETTINGS = {
    "name": "run",
    "sampling": {"max_tokens": 5},
    "algorithm": {"groups": 1, "group_size": SIZE, "branching": {"kind": "mc", "width": WIDTH}},
}


async def agent(task: Any) -> list[str]:
    messages: list[Any] = [{"role": "user", "content": str(task)}]
    async with openai.AsyncOpenAI() as client:
        for turn in range(TURNS):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}]
            messages += [{"role": "user", "content": f"turn {turn}"}]
    return [message["content"] for message in messages]


def verify(task: Any, result: list[str]) -> float:
    return sum("".join(result).encode()) % 17 / 16


def content(call: Transition) -> Hashable:
    return call.prompt.tobytes(), call.completion.tobytes()


async def test_branches_are_made_once_and_credited(server: EmbeddedServer, tmp_path: Path) -> None:
    config = resolve(SETTINGS, source="test")
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        group = await sampled(store, config, RunnerSide(server, agent, verify), killed_at=SIZE + 2)
    rollouts = {rollout.id: rollout for rollout in group.rollouts}
    assert {rollout.state for rollout in group.rollouts} == {RolloutState.SUCCEEDED}
    branches = [rollout for rollout in group.rollouts if rollout.branch]
    asked = [(branch.branch.rollout, branch.branch.calls) for branch in branches if branch.branch]
    sources = [rollout.id for rollout in group.rollouts if not rollout.branch]
    assert asked == [(u, i) for u in sources for i in range(1, TURNS) for _ in range(WIDTH)]
    for branch, (source, calls) in zip(branches, asked, strict=True):
        old, new = rollouts[source].transitions, branch.transitions
        assert len(new) == TURNS
        assert [call.repeats for call in new[:calls]] == [call.id for call in old[:calls]]
        assert list(map(content, new[:calls])) == list(map(content, old[:calls]))
        assert [call.repeats for call in new[calls:]] == [None] * (TURNS - calls)
        assert new[calls].prompt == old[calls].prompt
    assert replay_metrics([group]) == {
        "branches": SIZE * 2 * WIDTH,
        "branches/diverged": 0,
        "calls/repeated": SIZE * (1 + 2) * WIDTH,
    }

    # Each sampled token is trained once, and its advantage is that of Monte-Carlo values by hand.
    batch = build_batch([group])
    fresh = [call for row in group.rollouts for call in row.transitions if call.repeats is None]
    assert batch.n_tokens == sum(len(call.completion) for call in fresh)
    credit = compute_advantages(make("c3", {}), batch)
    ends, drawn = defaultdict(list), defaultdict(list)
    for rollout in group.rollouts:
        for call in rollout.transitions:
            ends[content(call)].append(rollout.reward())
    for call in fresh:
        drawn[call.prompt.tobytes()].append(content(call))
    for index, name in enumerate(batch.transitions):
        of_call = credit[batch.token_transition == index].tolist()
        call = next((call for call in fresh if call.id == name), None)
        if call is None:
            assert of_call == []
            continue
        others = list(drawn[call.prompt.tobytes()])
        others.remove(content(call))
        value = fmean(ends[content(call)])
        expected = value - fmean([fmean(ends[other]) for other in others] or [value])
        assert of_call == pytest.approx([expected] * len(call.completion), abs=1e-12)
    assert credit.abs().max() > 0.01

    trained = {batch.rollouts[u] for u in batch.token_rollout[~_vine(batch).isnan()].tolist()}
    assert trained == set(sources)


def _vine(batch: Any) -> Any:
    return compute_advantages(make("vineppo", {}), batch)
