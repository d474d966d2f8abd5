"""Six modes of communication; every agent chooses one in each round.

As in arXiv 2604.00344 and its code, edges are added in the order of the agents, an edge that would
close a cycle is left out, and in a debate the agent with the lower index speaks first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MODES = ("solo", "broadcast", "query", "aggregate", "verify", "debate")
Edges = set[tuple[int, int]]  # (speaker, listener)


def graph(modes: Sequence[int]) -> Edges:
    edges: Edges = set()
    for agent, mode in enumerate(modes):
        for source, target in _wanted(agent, MODES[mode], len(modes)):
            if not _reaches(edges, target, source):
                edges.add((source, target))
                if MODES[mode] == "debate":
                    edges.add((target, source))
    return edges


def order(edges: Edges, agents: int) -> list[int]:
    """The order in which agents speak: each after all agents that it listens to; in a cycle of
    debates, its first agent starts."""
    left, spoken = list(range(agents)), list[int]()
    while left:
        agent = next((a for a in left if not _waits(edges, a, left)), left[0])
        left.remove(agent)
        spoken.append(agent)
    return spoken


def _wanted(agent: int, mode: str, agents: int) -> Iterator[tuple[int, int]]:
    others = [other for other in range(agents) if other != agent]
    if mode == "broadcast":
        yield from ((agent, other) for other in others)
    elif mode == "query":
        yield agent, (agent + 1) % agents
    elif mode == "aggregate":
        yield from ((other, agent) for other in others)
    elif mode == "verify" and agent + 1 < agents:
        yield agent, agent + 1
    elif mode == "debate":
        yield agent, (agent + agents // 2) % agents


def _reaches(edges: Edges, start: int, goal: int) -> bool:
    seen, ahead = set[int](), [start]
    while ahead:
        agent = ahead.pop()
        if agent == goal:
            return True
        seen.add(agent)
        ahead += [target for source, target in edges if source == agent and target not in seen]
    return False


def _waits(edges: Edges, agent: int, left: Sequence[int]) -> bool:
    heard = [source for source, target in edges if target == agent and source in left]
    return any((agent, source) not in edges or source < agent for source in heard)
