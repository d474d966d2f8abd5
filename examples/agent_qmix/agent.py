"""A team of three frozen language models that chooses its communication graph in two rounds.

Each agent knows one relation and resolves one step of a question; a message that it hears, or its
own from the previous round, may be a step further. `choose` maps the observations so far to a
communication mode for every agent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypedDict

from openai import AsyncOpenAI
from topology import MODES, Edges, graph, order
from world import RELATIONS, hops

ROLES = list(RELATIONS)
ROUNDS, BYTES, NAMES = 2, 32, 16
MAX_TOKENS = 200  # normalises tokens per episode; 10 000 in the paper, whose models write essays
OBSERVATION = BYTES + NAMES + 3 + len(ROLES)
STATE = len(ROLES) * (OBSERVATION - len(ROLES)) + 3
Seen = list[list[list[float]]]  # [t, n, o]


class Played(TypedDict):
    answer: str
    tokens: int
    observations: Seen  # [T + 1, n, OBSERVATION]
    states: list[list[float]]  # [T + 1, STATE]
    modes: list[list[int]]  # [T, n]


class Team:
    """The team with its function that chooses modes: `choose(task, observations so far)`."""

    def __init__(self, choose: Callable[[dict[str, Any], Seen], list[int]]) -> None:
        self.choose = choose

    async def __call__(self, task: dict[str, Any]) -> Played:
        async with AsyncOpenAI() as client:
            return await self.play(client, task)

    async def play(self, client: AsyncOpenAI, task: dict[str, Any]) -> Played:
        question = task["question"]
        said, used = [""] * len(ROLES), [0] * len(ROLES)
        edges: Edges = set()
        seen, states, modes = [observe(question, said, used, edges)], list[list[float]](), []
        states.append(state(seen[-1], edges))
        for _ in range(ROUNDS):
            modes.append(self.choose(task, seen))
            edges = graph(modes[-1])
            for agent in order(edges, len(ROLES)):
                heard = [said[source] for source, target in sorted(edges) if target == agent]
                known = [text for text in (question, *heard, said[agent]) if text]
                known.sort(key=hops, reverse=True)  # the most useful text last
                said[agent], tokens = await ask(client, ROLES[agent], known)
                used[agent] += tokens
            seen.append(observe(question, said, used, edges))
            states.append(state(seen[-1], edges))
        answer = min(said, key=hops)
        return Played(
            answer=answer, tokens=sum(used), observations=seen, states=states, modes=modes
        )


async def ask(client: AsyncOpenAI, role: str, known: list[str]) -> tuple[str, int]:
    """The answer of an agent and the number of its tokens."""
    completion = await client.chat.completions.create(
        model=role,
        temperature=0.0,
        max_tokens=12,
        messages=[
            {"role": "system", "content": role},
            {"role": "user", "content": " ; ".join(known)},
        ],
    )
    tokens = completion.usage.total_tokens if completion.usage else 0
    return (completion.choices[0].message.content or "").strip(), tokens


def observe(question: str, said: list[str], used: list[int], edges: Edges) -> list[list[float]]:
    """[n, o]: for each agent the task's bytes, its index, whether it has spoken, its fraction of
    edges and of tokens; last, for the graph network, which agents it heard."""
    agents, text = len(said), fold(question)
    rows = []
    for agent in range(agents):
        name = [float(agent == index) for index in range(NAMES)]
        degree = sum(agent in edge for edge in edges)
        own = [float(bool(said[agent])), degree / agents, used[agent] / MAX_TOKENS]
        heard = [float((source, agent) in edges) for source in range(agents)]
        rows.append([*text, *name, *own, *heard])
    return rows


def state(seen: list[list[float]], edges: Edges) -> list[float]:
    """[s]: all observations, the number and density of edges, and the number of agents."""
    agents = len(seen)
    rows = [value for row in seen for value in row[:-agents]]
    return [*rows, float(len(edges)), len(edges) / agents**2, float(agents)]


def fold(text: str) -> list[float]:
    """The first bytes of a text, folded into a vector of length 1."""
    folded = [0.0] * BYTES
    for index, byte in enumerate(text.encode()[: 4 * BYTES]):
        folded[index % BYTES] += byte / 255
    norm = math.hypot(*folded) or 1.0
    return [value / norm for value in folded]


def fixed(mode: str) -> Callable[[dict[str, Any], Seen], list[int]]:
    """A `choose` function with which all agents always choose the same mode."""
    return lambda task, seen: [MODES.index(mode)] * len(ROLES)
