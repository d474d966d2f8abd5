"""Worlds of a few states whose policy gradient is known, to measure schemes of credit.

A world is a decision process without cycles (its nodes carry the time) and a policy by context. The
gradient of the expected total reward in the logits of each context is exact, by enumeration of the
nodes; estimates of it come from sampled batches, whose calls show a credit what a real batch shows:
the state (the last observation), the action, the prompt and the probability of what was said.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algorithms.credit.core import Credit
from agentrl.algorithms.data.batch import Batch

Array = NDArray[np.float64]
Node = tuple[Any, ...]
Branch = tuple[float, float, Node | None]  # probability, reward, what follows; None: the end


@dataclass(frozen=True, slots=True)
class World:
    """`recurring`: states recur and tell the truth. Within a task, the expected reward to come of
    each action in a state does not depend on what happened before, and no call but the last is
    paid, or the credit is told which was."""

    name: str
    start: Node
    policy: Callable[[Node], Sequence[float]]  # probability of each action
    step: Callable[[Node, int], list[Branch]]
    sees: Callable[[Node], Hashable]  # the last observation of the agent
    context: Callable[[Node], Hashable] | None = None  # what the policy reads; None: what it sees
    role: Callable[[Node], str] = lambda node: "agent"
    recurring: bool = False
    process: bool = False  # each call's reward is known, not only their sum
    remembers: bool = False  # prompts keep the conversation
    texts: bool = False  # no two calls say the same
    unique: Callable[[Node], bool] = lambda node: False  # no other call sees the same
    tasks: tuple[Node, ...] = ()  # where groups start, each in one of them; none: all at `start`


class Compiled:
    """A world as arrays over its nodes [V], actions [A] and branches [K]."""

    def __init__(self, world: World) -> None:
        self.world = world
        queue = list(world.tasks or (world.start,))
        nodes: dict[Node, int] = {node: v for v, node in enumerate(queue)}
        self.tasks = len(queue)
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
        self.unique = np.array([world.unique(node) for node in queue])
        self.roles = sorted({world.role(node) for node in queue})
        self.role = np.array([self.roles.index(world.role(node)) for node in queue])
        self.value, self.visits = np.zeros(len(queue)), np.zeros(len(queue))
        self.exact = self.gradient()

    def ids(self, of: Callable[[Node], Hashable]) -> NDArray[np.int64]:
        found: dict[Hashable, int] = {}
        return np.array([found.setdefault(of(node), len(found)) for node in self.nodes])

    def gradient(self) -> Array:
        """d (expected total) / d logits by context [C, A]. Values of nodes and expected visits are
        computed until nothing changes."""
        start = np.zeros(len(self.nodes))
        start[: self.tasks] = 1 / self.tasks
        while True:
            q = self.q()
            value = (self.policy * q).sum(1)
            flow = (self.visits[:, None] * self.policy)[:, :, None] * self.chance
            visits = start.copy()
            np.add.at(visits, self.after[self.after >= 0], flow[self.after >= 0])
            if np.array_equal(value, self.value) and np.array_equal(visits, self.visits):
                break
            self.value, self.visits = value, visits
        gradient = np.zeros((self.context.max() + 1, self.policy.shape[1]))
        effect = visits[:, None] * self.policy * (q - value[:, None])
        np.add.at(gradient, self.context, effect)
        return np.where(abs(gradient) > 1e-12, gradient, 0.0)

    def q(self) -> Array:
        """Expected reward of each action [V, A] by the values of nodes."""
        after = np.where(self.after >= 0, self.value[self.after], 0.0)
        q: Array = (self.chance * (self.reward + after)).sum(2)
        return q

    def sample(self, groups: int, size: int, draw: np.random.Generator) -> list[dict[str, Array]]:
        """Each turn's node, action and reward of the rollouts that are not at their end."""
        turns, alive = [], np.arange(groups * size)
        node = draw.integers(self.tasks, size=groups).repeat(size)
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
    turns = world.sample(count * groups, size, draw)
    rollout = np.concatenate([turn["rollout"] for turn in turns]).astype(np.int64)
    time = np.concatenate([np.full(len(turn["node"]), t) for t, turn in enumerate(turns)])
    order = np.lexsort((time, rollout))
    node, action, reward = (
        np.concatenate([turn[name] for turn in turns])[order]
        for name in ("node", "action", "reward")
    )
    rollout, time = rollout[order], time[order]
    sees, said = world.sees[node].astype(np.int64), action
    unique = world.unique[node]
    sees[unique] = len(world.nodes) + np.nonzero(unique)[0]
    if world.world.texts:
        said = np.arange(len(action))
    # The conversation so far as an id: of the one before, what was said and what is seen now.
    history = sees.copy()
    for t in range(1, len(turns)):
        now = np.nonzero(time == t)[0]
        history[now] = (t << 40) + dense(history[now - 1], said[now - 1], sees[now])
    prompt = history if world.world.remembers else sees
    bounds = np.searchsorted(rollout, np.arange(0, (count + 1) * each, each))
    found = []
    for first, last in pairwise(bounds):
        cut = slice(first, last)
        owner = rollout[cut] - rollout[first]
        batch = batch_of(world, groups, size, owner, node[cut], action[cut], reward[cut])
        batch = replace(
            batch,
            transition_state=torch.from_numpy(dense(sees[cut])),
            transition_action=torch.from_numpy(dense(said[cut])),
            transition_prompt=torch.from_numpy(dense(prompt[cut])),
            transition_node=torch.from_numpy(dense(prompt[cut], said[cut])),
        )
        found.append(Sample(batch, world.context[node[cut]], action[cut], world.policy[node[cut]]))
    return found


def batch_of(
    world: Compiled,
    groups: int,
    size: int,
    rollout: NDArray[np.int64],
    node: NDArray[np.int64],
    action: NDArray[np.int64],
    reward: Array,
) -> Batch:
    """A batch of calls of one token. `transition:value` is what a perfect critic would say."""
    calls, rollouts = len(node), groups * size
    total, index, owner = np.zeros(rollouts), torch.arange(calls), torch.from_numpy(rollout)
    np.add.at(total, rollout, reward)
    value = world.value[node]
    if not world.world.process:
        paid = reward.cumsum() - reward
        first = np.searchsorted(rollout, rollout)
        value = value + paid - paid[first]
    return Batch(
        rows=[],
        token_row=index,
        token_transition=index,
        sampler_logprobs=torch.from_numpy(np.log(world.policy[node, action])).float(),
        transition_rollout=owner,
        transition_role=torch.from_numpy(world.role[node]),
        row_rollout=owner,
        rollout_group=torch.arange(rollouts) // size,
        rewards={
            "outcome": torch.from_numpy(total),
            "transition:process": torch.from_numpy(reward),
            "transition:value": torch.from_numpy(value),
        },
        roles=world.roles,
        groups=[str(g) for g in range(groups)],
        rollouts=[str(u) for u in range(rollouts)],
        transitions=[str(s) for s in range(calls)],
        transition_repeats=torch.zeros(calls, dtype=torch.bool),
        transition_truncated=torch.zeros(calls, dtype=torch.bool),
    )


def estimates(credit: Credit, world: Compiled, batches: Sequence[Sample]) -> Array:
    """The estimated gradient of each batch [B, C * A]; if the exact one is 0, relative to the root
    mean square of the advantages, as there is no other scale."""
    found, squares = np.zeros((len(batches), *world.exact.shape)), 0.0
    for estimate, sample in zip(found, batches, strict=True):
        a = credit(sample.batch).nan_to_num(nan=0.0).numpy()
        score = -sample.policy
        score[np.arange(len(a)), sample.action] += 1.0
        np.add.at(estimate, sample.context, a[:, None] * score)
        estimate /= len(sample.batch.rollouts)
        squares += float((a**2).mean()) / len(batches)
    if not world.exact.any():
        found /= squares**0.5 or 1.0
    return found.reshape(len(batches), -1)


@dataclass(frozen=True, slots=True)
class Figures:
    share: float  # of the exact gradient, along it; 1: unbiased
    bias: float  # the rest of the expected estimate, relative to the exact gradient
    variance: float  # of the estimate at a share of 1, relative to the gradient's square
    error: float  # mean squared, of the estimate at a share of 1


def figures(estimates: Array, exact: Array) -> Figures:
    """If the exact gradient is 0, everything is error. A bias is less what noise explains of it."""
    exact, square, count = exact.reshape(-1), float((exact**2).sum()), len(estimates)
    share = float(estimates.mean(0) @ exact) / square if square else float("nan")
    if share <= 0:
        return Figures(share, float("nan"), float("inf"), float("inf"))
    scaled = estimates / share / square**0.5 if square else estimates
    off = scaled - exact / square**0.5 if square else scaled
    variance = float(scaled.var(0).sum())
    bias = max(0.0, float((off.mean(0) ** 2).sum()) - variance / (count - 1))
    return Figures(share, bias**0.5, variance, float((off**2).sum(1).mean()))
