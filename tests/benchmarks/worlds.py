"""Worlds of a few states whose policy gradient is known, to measure schemes of credit.

A world is a decision process without cycles (its nodes carry the time) and a policy by context. The
gradient of the expected total reward in the logits of each context is exact, by enumeration of the
nodes; estimates of it come from sampled batches, whose calls show a credit what a real batch shows:
the state (the last observation), the action, the prompt and the probability of what was said.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.credit.core import Credit
from agentrl.algorithms.data.batch import Batch

Array = NDArray[np.float64]
Node = tuple[Hashable, ...]
Branch = tuple[float, float, Node | None]  # probability, reward, what follows; None: the end


@dataclass(frozen=True, slots=True)
class World:
    name: str
    start: Node
    policy: Callable[[Node], Sequence[float]]  # probability of each action
    step: Callable[[Node, int], list[Branch]]
    sees: Callable[[Node], Hashable]  # the last observation of the agent
    context: Callable[[Node], Hashable] | None = None  # what the policy reads; None: what it sees
    role: Callable[[Node], str] = lambda node: "agent"
    recurring: bool = False  # states recur and show all that matters for the future
    process: bool = False  # each call's reward is known, not only their sum
    remembers: bool = False  # prompts keep the conversation
    texts: bool = False  # no two calls say the same


class Compiled:
    """A world as arrays over its nodes [V], actions [A] and branches [K]."""

    def __init__(self, world: World) -> None:
        self.world = world
        nodes: dict[Node, int] = {world.start: 0}
        queue = [world.start]
        steps: list[list[list[Branch]]] = []
        policies: list[list[float]] = []
        for node in queue:
            policies.append(list(world.policy(node)))
            steps.append([world.step(node, a) for a in range(len(policies[-1]))])
            for branches in steps[-1]:
                for _, _, after in branches:
                    if after is not None and after not in nodes:
                        nodes[after] = len(nodes)
                        queue.append(after)
        self.nodes = queue
        actions = max(map(len, policies))
        width = max(len(branches) for each in steps for branches in each)
        shape = (len(queue), actions, width)
        self.policy = np.zeros(shape[:2])
        self.chance, self.reward = np.zeros(shape), np.zeros(shape)
        self.after = np.full(shape, -1)
        for v, each in enumerate(steps):
            self.policy[v, : len(each)] = policies[v]
            for a, branches in enumerate(each):
                for k, (chance, reward, after) in enumerate(branches):
                    self.chance[v, a, k], self.reward[v, a, k] = chance, reward
                    self.after[v, a, k] = -1 if after is None else nodes[after]
        context = world.context or world.sees
        self.context = self.ids(context)
        self.sees = self.ids(world.sees)
        self.roles = sorted({world.role(node) for node in queue})
        self.role = np.array([self.roles.index(world.role(node)) for node in queue])
        self.exact = self.gradient()

    def ids(self, of: Callable[[Node], Hashable]) -> NDArray[np.int64]:
        found: dict[Hashable, int] = {}
        return np.array([found.setdefault(of(node), len(found)) for node in self.nodes])

    def gradient(self) -> Array:
        """d (expected total) / d logits by context [C, A]; nodes come before those they lead to by
        at least one path, so values are computed until nothing changes."""
        count, actions = self.policy.shape
        value = np.zeros(count)
        while True:
            after = np.where(self.after >= 0, value[self.after], 0.0)
            q = (self.chance * (self.reward + after)).sum(2)
            new = (self.policy * q).sum(1)
            if np.array_equal(new, value):
                break
            value = new
        visits = np.zeros(count)
        visits[0] = 1.0
        while True:
            new = np.zeros(count)
            new[0] = 1.0
            flow = (visits[:, None] * self.policy)[:, :, None] * self.chance
            np.add.at(new, self.after[self.after >= 0], flow[self.after >= 0])
            if np.allclose(new, visits, rtol=0, atol=0):
                break
            visits = new
        gradient = np.zeros((self.context.max() + 1, actions))
        np.add.at(gradient, self.context, visits[:, None] * self.policy * (q - value[:, None]))
        return gradient

    def sample(self, rollouts: int, draw: np.random.Generator) -> list[dict[str, Array]]:
        """Each turn's node, action and reward of the rollouts that are not at their end."""
        turns, alive, node = [], np.arange(rollouts), np.zeros(rollouts, dtype=np.int64)
        while alive.size:
            action = pick(self.policy[node], draw)
            branch = pick(self.chance[node, action], draw)
            turns.append(
                {
                    "rollout": alive,
                    "node": node,
                    "action": action,
                    "reward": self.reward[node, action, branch],
                }
            )
            after = self.after[node, action, branch]
            alive, node = alive[after >= 0], after[after >= 0]
        return turns


def pick(chances: Array, draw: np.random.Generator) -> NDArray[np.int64]:
    """An index for each row of probabilities [N, K]."""
    bounds = chances.cumsum(1)
    at = draw.random(len(chances))[:, None] * bounds[:, -1:]
    index: NDArray[np.int64] = (at >= bounds).sum(1)
    return index


def dense(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    index: NDArray[np.int64] = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1]
    return index.reshape(-1)


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch and the score of each call: its context, action and probabilities [S, A]."""

    batch: Batch
    context: NDArray[np.int64]
    action: NDArray[np.int64]
    policy: Array


def samples(world: Compiled, groups: int, size: int, count: int, seed: int) -> list[Sample]:
    """`count` batches of `groups` groups of `size` rollouts."""
    draw, each = np.random.default_rng(seed), groups * size
    turns = world.sample(count * each, draw)
    rollout = np.concatenate([turn["rollout"] for turn in turns]).astype(np.int64)
    time = np.concatenate([np.full(len(turn["node"]), t) for t, turn in enumerate(turns)])
    order = np.lexsort((time, rollout))
    node, action, reward = (
        np.concatenate([turn[name] for turn in turns])[order]
        for name in ("node", "action", "reward")
    )
    rollout, time = rollout[order], time[order]
    # The conversation so far as an id: of the one before, its action and what is seen now.
    history = world.sees[node].astype(np.int64)
    for t in range(1, len(turns)):
        now = np.nonzero(time == t)[0]
        history[now] = (t << 40) + dense(history[now - 1], action[now - 1], world.sees[node[now]])
    bounds = np.searchsorted(rollout, np.arange(0, (count + 1) * each, each))
    found = []
    for first, last in pairwise(bounds):
        cut = slice(first, last)
        found.append(
            sample_of(world, groups, size, rollout[cut] - rollout[first], node[cut], action[cut],
                      reward[cut], history[cut])
        )  # fmt: skip
    return found


def sample_of(
    world: Compiled,
    groups: int,
    size: int,
    rollout: NDArray[np.int64],
    node: NDArray[np.int64],
    action: NDArray[np.int64],
    reward: Array,
    history: NDArray[np.int64],
) -> Sample:
    calls, rollouts = len(node), groups * size
    index = torch.arange(calls)
    sees, said = world.sees[node], action
    if world.world.texts:
        said = np.arange(calls)
    prompt = history if world.world.remembers else sees
    group = torch.arange(rollouts) // size
    total = np.zeros(rollouts)
    np.add.at(total, rollout, reward)
    owner = torch.from_numpy(rollout)
    batch = Batch(
        rows=[],
        token_row=index,
        token_transition=index,
        behaviour=torch.from_numpy(np.log(world.policy[node, action])).float(),
        transition_rollout=owner,
        transition_role=torch.from_numpy(world.role[node]),
        row_rollout=owner,
        rollout_group=group,
        rewards={
            "outcome": torch.from_numpy(total),
            "transition:process": torch.from_numpy(reward),
        },
        roles=world.roles,
        groups=[str(g) for g in range(groups)],
        rollouts=[str(u) for u in range(rollouts)],
        transitions=[str(s) for s in range(calls)],
        transition_state=torch.from_numpy(dense(sees)),
        transition_action=torch.from_numpy(dense(said)),
        transition_prompt=torch.from_numpy(dense(prompt)),
        transition_node=torch.from_numpy(dense(prompt, said)),
        transition_repeats=torch.zeros(calls, dtype=torch.bool),
        transition_truncated=torch.zeros(calls, dtype=torch.bool),
    )
    return Sample(batch, world.context[node], action, world.policy[node])


def estimates(credit: Credit, world: Compiled, batches: Sequence[Sample]) -> Array:
    """The estimated gradient of each batch [B, C * A]."""
    found = np.zeros((len(batches), *world.exact.shape))
    for estimate, sample in zip(found, batches, strict=True):
        a = credit(sample.batch).nan_to_num(nan=0.0).numpy()
        score = -sample.policy
        score[np.arange(len(a)), sample.action] += 1.0
        np.add.at(estimate, sample.context, a[:, None] * score)
        estimate /= len(sample.batch.rollouts)
    return found.reshape(len(batches), -1)


@dataclass(frozen=True, slots=True)
class Figures:
    share: float  # of the exact gradient, along it; 1: unbiased
    bias: float  # the rest of the expected estimate, relative to the exact gradient
    variance: float  # of the estimate at a share of 1, relative to the gradient's square
    error: float  # mean squared, of the estimate at a share of 1


def figures(estimates: Array, exact: Array) -> Figures:
    """If the exact gradient is 0, everything is error, at the estimate's own scale."""
    exact, square = exact.reshape(-1), float((exact**2).sum())
    mean = estimates.mean(0)
    if square < 1e-12:
        return Figures(float("nan"), float((mean**2).sum()), float(estimates.var(0).sum()),
                       float((estimates**2).sum(1).mean()))  # fmt: skip
    share = float(mean @ exact) / square
    if share <= 0:
        return Figures(share, float("nan"), float("inf"), float("inf"))
    scaled = estimates / share
    bias = float(((scaled.mean(0) - exact) ** 2).sum()) / square
    variance = float(scaled.var(0).sum()) / square
    return Figures(share, bias**0.5, variance, bias + variance)
