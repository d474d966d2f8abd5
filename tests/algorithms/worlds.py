"""Batches written as what happened, and random ones, for tests of credit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import dense_ids
from agentrl.algorithms.objective.ratios import LearnerOutput

NAN = math.nan
EVERY_OUTPUT: tuple[LearnerOutput, ...] = (
    "old", "sampler", "reference", "teacher", "values", "top_tokens", "observations",
)  # fmt: skip


@dataclass
class Call:
    """One model call; `rewards` by name of transition scope."""

    state: object = None
    tokens: int = 1
    role: str = "agent"
    rewards: Mapping[str, float] = field(default_factory=dict)
    node: object = None  # None: a branch of its own
    prompt: object = None  # None: what the call before was answered
    repeats: bool = False
    truncated: bool = False
    logprob: float = -1.0  # of each of its tokens, when it was sampled


@dataclass
class Play:
    """One rollout; `tact` is a reward by role."""

    calls: Sequence[Call]
    outcome: float = NAN
    group: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)
    tact: Mapping[str, float] = field(default_factory=dict)
    greedy: bool = False


def calls_without_tokens() -> tuple[Play, Play, Play, list[float]]:
    """A rollout with a call without tokens; the same, with what that received as the reward of the
    call before; another rollout; and values of the four calls with tokens or not."""
    bare = [
        Call(rewards={"p": 1.0}, tokens=2),
        Call(rewards={"p": 2.0}, tokens=0),
        Call(rewards={"p": 4.0}),
    ]
    joined = [Call(rewards={"p": 3.0}, tokens=2), Call(rewards={"p": 4.0})]
    return Play(bare), Play(joined), Play([Call(rewards={"p": -1.0})]), [0.3, 0.9, 0.5, 0.1]


def world(*plays: Play, values: Sequence[float] = ()) -> Batch:
    """The batch of these rollouts with every reward that one of them has."""
    calls = [(u, call) for u, play in enumerate(plays) for call in play.calls]
    roles = sorted({call.role for _, call in calls})
    rollout = torch.tensor([u for u, _ in calls], dtype=torch.int64)
    sizes = torch.tensor([call.tokens for _, call in calls], dtype=torch.int64)
    token_call = torch.arange(len(calls)).repeat_interleave(sizes)
    names = {"outcome", *(name for play in plays for name in play.rewards)}
    of_calls = {name for _, call in calls for name in call.rewards}
    columns = {
        name: [play.outcome if name == "outcome" else play.rewards.get(name, NAN) for play in plays]
        for name in names
    }
    columns |= {
        f"transition:{name}": [call.rewards.get(name, NAN) for _, call in calls]
        for name in of_calls
    }
    columns["role:tact"] = [play.tact.get(role, NAN) for play in plays for role in roles]
    groups = [play.group for play in plays]
    return Batch(
        rows=[],
        token_row=token_call,
        token_transition=token_call,
        sampler_logprobs=torch.tensor([call.logprob for _, call in calls])[token_call],
        transition_rollout=rollout,
        transition_role=torch.tensor([roles.index(c.role) for _, c in calls], dtype=torch.int64),
        row_rollout=rollout,
        rollout_group=torch.tensor(groups),
        rewards={name: torch.tensor(x, dtype=torch.float64) for name, x in columns.items()},
        roles=roles,
        groups=[str(g) for g in range(max(groups) + 1)],
        rollouts=[f"r{u}" for u in range(len(plays))],
        transitions=[f"t{s}" for s in range(len(calls))],
        transition_state=dense_ids([call.state for _, call in calls]),
        transition_action=dense_ids(
            [s if c.node is None else c.node for s, (_, c) in enumerate(calls)]
        ),
        transition_repeats=torch.tensor([call.repeats for _, call in calls]).bool(),
        transition_prompt=dense_ids(_prompts(plays)),
        transition_node=dense_ids(
            [s if call.node is None else str(call.node) for s, (_, call) in enumerate(calls)]
        ),
        transition_truncated=torch.tensor([call.truncated for _, call in calls]).bool(),
        rollout_greedy=torch.tensor([play.greedy for play in plays]),
        values=torch.tensor(list(values), dtype=torch.float64),
    )


def _prompts(plays: Sequence[Play]) -> Iterator[Hashable]:
    for u, play in enumerate(plays):
        before: Hashable = ()
        for i, call in enumerate(play.calls):
            yield str(before if call.prompt is None else call.prompt)
            before = (u, i) if call.node is None else str(call.node)


def random_plays(seed: int, *, groups: int = 3, size: int = 4, missing: float = 0.15) -> list[Play]:
    """Rollouts of calls in few states, with rewards of every scope, some of them missing."""
    draw, sampled = random.Random(seed), random.Random(f"log-probs {seed}")

    def value() -> float:
        return NAN if draw.random() < missing else draw.randint(0, 8) / 8

    def call(number: int, before: object = None) -> Call:
        return Call(
            state=draw.randint(0, 2),
            tokens=draw.randint(1, 3),
            role=draw.choice(["actor", "critic"]),
            rewards={"p": value(), "v": draw.random(), "w": draw.random()},
            node=f"{before}-{draw.randint(0, 1)}" if number < 2 else None,
            truncated=draw.random() < 0.2,
            logprob=-sampled.randint(0, 16) / 8,
        )

    def calls(n: int) -> list[Call]:
        made: list[Call] = []
        for number in range(n):
            made.append(call(number, made[-1].node if made else None))
        return made

    return [
        Play(
            calls(draw.randint(1, 5)),
            outcome=value(),
            group=g,
            tact={"actor": value(), "critic": value()},
        )
        for g in range(groups)
        for _ in range(draw.randint(1, size))
    ]


def coefficients_of(loss: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
    """psi = -d loss / d p [N], float64, for any scalar function of the log-probs."""
    leaf = p.detach().double().requires_grad_()
    return -torch.autograd.grad(loss(leaf), leaf)[0]
