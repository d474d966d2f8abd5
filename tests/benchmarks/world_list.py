"""Worlds with an exact gradient: those in which a credit was found to fail, and the honest ones.

In nearly all the policy has two actions. Nodes start with the number of earlier calls. Where the
prompt keeps the conversation (`remembers`), the state is still the last observation only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .worlds import Branch, Node, World

HALF = (0.5, 0.5)


def two(p: float) -> tuple[float, float]:
    return p, 1 - p


def to(node: Node) -> list[Branch]:
    """What follows for certain, unpaid."""
    return [(1.0, 0.0, node)]


def paid(p: float, win: float = 1.0, lose: float = 0.0) -> list[Branch]:
    """The end."""
    return [(chance, pay, None) for chance, pay in ((p, win), (1 - p, lose)) if chance > 0]


def first(p: float) -> Callable[[Node], tuple[float, float]]:
    """A policy whose first call alone matters."""
    return lambda node: two(p) if node[0] == 0 else HALF


# -- States that do not show what happened ---------------------------------------------------------


def oks(calls: int, win: float = 1.0, lose: float = 0.0, name: str = "ok") -> World:
    """The first call decides, tools answer "ok", the last call sees the result."""

    def sees(node: Node) -> str:
        t, way = node
        return "task" if t == 0 else "ok" if t <= calls else ("passed", "failed")[way]

    def step(node: Node, a: int) -> list[Branch]:
        t, way = node
        way = a if t == 0 else way
        return paid(1 - way, win, lose) if t > calls else to((t + 1, way))

    return World(f"{name} x {calls}", (0, 0), first(0.3), step, sees, remembers=True)


def shown_late(calls: int, shown: int = 1, win: float = 0.7, p: float = 0.3) -> World:
    """As `oks`, but the first call only makes success likely; the result is settled after the
    "ok"s and seen by the last `shown` calls."""

    def sees(node: Node) -> str:
        t, _, passed = node
        return "task" if t == 0 else "ok" if t <= calls else ("failed", "passed")[passed]

    def step(node: Node, a: int) -> list[Branch]:
        t, way, passed = node
        way = a if t == 0 else way
        if t == calls + shown:
            return paid(passed)
        chance = (win, 1 - win)[way]
        if t == calls:
            return [(chance, 0.0, (t + 1, 0, 1)), (1 - chance, 0.0, (t + 1, 0, 0))]
        return to((t + 1, 0 if t > calls else way, passed))

    name = f"flaky x {calls}" + (f", seen {shown} times" if shown > 1 else "")
    return World(name, (0, 0, 0), first(p), step, sees, remembers=True)


def shared(calls: int) -> World:
    """A good and a bad way share "ok"; the middling one has its own answers."""

    def step(node: Node, a: int) -> list[Branch]:
        t, way = node
        way = a if t == 0 else way
        return [(1.0, (1.0, 0.0, 0.6)[way], None)] if t == calls else to((t + 1, way))

    def sees(node: Node) -> str:
        return "task" if node[0] == 0 else "fine" if node[1] == 2 else "ok"

    def policy(node: Node) -> tuple[float, ...]:
        return (0.3, 0.3, 0.4) if node[0] == 0 else HALF

    return World(f"shared ok x {calls}", (0, 0), policy, step, sees, remembers=True)


def xor(between: int, p: float = 0.5) -> World:
    """Right if the first call and one after `between` "ok"s agree; the policy knows the history."""

    def step(node: Node, a: int) -> list[Branch]:
        t, early, late = node
        early = a if t == 0 else early
        late = a if t == between else late
        return paid(early == late) if t > between else to((t + 1, early, late))

    def sees(node: Node) -> str:
        return "task" if node[0] == 0 else "ok"

    name = f"xor over {between}" + (f", {p}" if p != 0.5 else "")
    return World(name, (0, 0, 0), lambda _: two(p), step, sees, lambda node: node, remembers=True)


def aliased(memory: bool) -> World:
    """Rooms look alike; the last call must do as the first did, which the policy may remember."""

    def step(node: Node, a: int) -> list[Branch]:
        t, way = node
        return paid(a == way) if t == 4 else to((t + 1, a if t == 0 else way))

    def sees(node: Node) -> str:
        return "start" if node[0] == 0 else "room"

    name = "aliased, " + ("memory" if memory else "no memory")
    context = (lambda node: node) if memory else None
    return World(name, (0, 0), lambda _: HALF, step, sees, context, remembers=memory)


def blind(calls: int = 4) -> World:
    """Right if two calls did 1; they see the number of earlier calls only. The policy remembers."""

    def step(node: Node, a: int) -> list[Branch]:
        path = (*node, a)
        return paid(sum(path) >= 2) if len(path) == calls else to(path)

    return World("blind calls", (), lambda _: HALF, step, len, lambda n: n, remembers=True)


def duplicates(calls: int, win: float, lose: float, ends: float = 0.25) -> World:
    """Conversations of unique calls, of which only a few failures end alike."""

    def step(node: Node, a: int) -> list[Branch]:
        t, way, end = node
        if t == calls - 1:
            return paid(end == "passed")
        if t < calls - 2:
            return to((t + 1, a if t == 0 else way, ""))
        chance = (win, lose)[way]
        each = (
            (chance, "passed"),
            ((1 - chance) * ends, "timeout"),
            ((1 - chance) * (1 - ends), ""),
        )
        return [(p, 0.0, (t + 1, 0, end)) for p, end in each if p > 0]

    def unique(node: Node) -> bool:
        return node[0] > 0 and node[2] != "timeout"

    name = f"{calls} unique calls, {win} or {lose}"
    return World(name, (0, 0, ""), first(0.5), step, lambda n: n, lambda n: (n[0] == 0, n[2]),
                 unique=unique, remembers=True)  # fmt: skip


def noise(calls: int = 6, rooms: int = 8) -> World:
    """The outcome depends on nothing."""

    def step(node: Node, a: int) -> list[Branch]:
        t = node[0]
        return paid(0.5) if t == calls else [(1 / rooms, 0.0, (t + 1, j)) for j in range(rooms)]

    return World("noise", (0, 0), lambda _: HALF, step, lambda node: node, remembers=True)


# -- States that tell the truth, some of them all of it --------------------------------------------


def corridor(
    length: int = 5,
    slip: float = 0.2,
    p: float = 0.6,
    limit: int = 8,
    lowest: float = 0.0,
    remembers: bool = False,
    name: str = "corridor",
) -> World:
    """Forward or back, and sometimes the other way; 1 above the lowest for the end within a limit
    of calls that states do not show."""

    def step(node: Node, a: int) -> list[Branch]:
        t, x = node
        out: list[Branch] = []
        for chance, ahead in ((1 - slip, a == 0), (slip, a != 0)):
            y = x + 1 if ahead else max(0, x - 1)
            end = y == length or t + 1 == limit
            out.append((chance, (lowest + (y == length)) * end, None if end else (t + 1, y)))
        return [branch for branch in out if branch[0] > 0]

    return World(name, (0, 0), lambda _: two(p), step, lambda node: node[1], remembers=remembers)


def places(
    name: str,
    count: int,
    limit: int,
    actions: int = 3,
    right: float = 0.5,
    back: Callable[[int], int] = lambda place: place,
    unit: int = 1,
) -> World:
    """One of the actions leads to the next place, the others stay or fall back; paid are full units
    of places reached within a limit of calls that states do not show."""
    policy = (right,) + ((1 - right) / (actions - 1),) * (actions - 1)

    def step(node: Node, a: int) -> list[Branch]:
        t, x = node
        y = x + 1 if a == 0 else back(x)
        end = y == count or t + 1 == limit
        return [(1.0, y // unit * unit / count, None)] if end else to((t + 1, y))

    return World(name, (0, 0), lambda _: policy, step, lambda node: node[1])


def rooms(
    depth: int = 5,
    width: int = 3,
    luck: float = 0.3,
    certain: bool = False,
    remembers: bool = False,
    seed: int = 0,
    name: str = "rooms",
) -> World:
    """An action and luck lead from room to room; the last room and action decide, for certain or
    with a probability. The state shows room and time."""
    draw = np.random.default_rng(seed)
    way = draw.integers(0, width, (depth, width, 2))
    win = draw.random((width, 2))
    if certain:
        win = (win > 0.5).astype(float)
        win[0] = 1.0, 0.0

    def step(node: Node, a: int) -> list[Branch]:
        t, x = node
        if t == depth - 1:
            return paid(win[x, a])
        aim = way[t, x, a]
        return [(luck / width + (1 - luck) * (y == aim), 0.0, (t + 1, y)) for y in range(width)]

    return World(name, (0, 0), lambda _: HALF, step, lambda node: node, recurring=True,
                 remembers=remembers)  # fmt: skip


def team() -> World:
    """Rooms with two roles by turns."""
    return replace(
        rooms(6, seed=3, name="team"), role=lambda node: ("planner", "worker")[node[0] % 2]
    )


def chain(right: float, depth: int = 4, actions: int = 4) -> World:
    """Right only if all calls are."""
    policy = (right,) + ((1 - right) / (actions - 1),) * (actions - 1)

    def step(node: Node, a: int) -> list[Branch]:
        t, ok = node
        ok = ok and a == 0
        return paid(ok) if t == depth - 1 else to((t + 1, ok))

    return World(f"chain, {right}", (0, True), lambda _: policy, step, lambda node: node,
                 recurring=True, remembers=True)  # fmt: skip


# -- Rewards on the way ----------------------------------------------------------------------------


def walk(process: bool, luck: float = 0.5, depth: int = 8) -> World:
    """A step earns 1 for another action than the one before, with luck; known by call or in all."""

    def step(node: Node, a: int) -> list[Branch]:
        t, before = node
        after = None if t == depth - 1 else (t + 1, a)
        return [(0.5, (a != before) + by, after) for by in (-luck, luck)]

    name = "walk, dense rewards" if process else "walk"
    return World(name, (0, 0), lambda _: HALF, step, lambda node: node, process=process,
                 recurring=process)  # fmt: skip


def walk_shown(luck: float = 0.5, depth: int = 6) -> World:
    """A walk whose last observation is the sum."""

    def step(node: Node, a: int) -> list[Branch]:
        t, before, total = node
        if t == depth:
            return [(1.0, total, None)]
        return [(0.5, 0.0, (t + 1, a, total + (a != before) + by)) for by in (-luck, luck)]

    return World("walk, sum shown", (0, 0, 0.0), lambda _: HALF, step,
                 lambda n: n[:2] if n[0] < depth else (depth, n[2]), lambda n: n[:2])  # fmt: skip


def delayed(depth: int = 6, lag: int = 3, luck: float = 0.3) -> World:
    """A call's reward comes `lag` calls later; the state shows the last action only."""

    def step(node: Node, a: int) -> list[Branch]:
        t, past = node
        past = (*past, a)
        earned = float(len(past) > lag and past[0] == 0)
        after = None if t == depth + lag - 1 else (t + 1, past[-lag:])
        return [(0.5, earned + by, after) for by in (-luck, luck)]

    def policy(node: Node) -> tuple[float, float]:
        return (0.4, 0.6) if node[0] < depth else HALF

    return World("delayed rewards", (0, ()), policy, step, lambda n: (n[0], n[1][-1:]),
                 process=True, remembers=True)  # fmt: skip


# -- Numbers of calls ------------------------------------------------------------------------------


def lengths(
    p: float = 0.4, few: tuple[int, float] = (2, 0.8), many: tuple[int, float] = (9, 1.0)
) -> World:
    """Many calls for a bit more than few."""

    def step(node: Node, a: int) -> list[Branch]:
        t, way = node
        way = a if t == 0 else way
        calls, pay = (few, many)[way]
        return [(1.0, pay, None)] if t + 1 == calls else to((t + 1, way))

    return World("lengths", (0, -1), first(1 - p), step, lambda node: node, remembers=True)


def mixed(once: float = 0.5, p: float = 0.3) -> World:
    """An answer at once, or three calls of which the first decides."""

    def step(node: Node, a: int) -> list[Branch]:
        t, way = node
        if t == 0:
            return paid(0.4) if a == 0 else to((1, -1))
        way = a if t == 1 else way
        return paid((0.8, 0.2)[way]) if t == 3 else to((t + 1, way))

    def policy(node: Node) -> tuple[float, float]:
        return {0: two(once), 1: two(p)}.get(node[0], HALF)

    return World(f"mixed, {once} at once", (0, -1), policy, step,
                 lambda node: ("task", "opened", "ok", "ok")[node[0]], remembers=True)  # fmt: skip


def bandit(luck: float = 0.5) -> World:
    """One call."""

    def step(node: Node, a: int) -> list[Branch]:
        return [(0.5, (1.0, 0.5, 0.0)[a] + by, None) for by in (-luck, luck)]

    return World("one call", (0,), lambda _: (0.2, 0.3, 0.5), step, lambda node: node)


def all_worlds() -> list[World]:
    return [
        *(oks(calls) for calls in (1, 2, 4, 6)),
        oks(4, -9.0, -10.0, "-9 or -10, ok"),
        shared(5),
        *(shown_late(calls) for calls in (1, 4)),
        replace(shown_late(4, 1, 0.8, 0.5), name="flaky x 4, 0.8"),
        *(shown_late(calls, shown) for calls, shown in ((1, 3), (3, 2))),
        replace(shown_late(3, 2, 1.0), name="ok x 3, seen twice"),
        *(xor(between) for between in (1, 3)),
        xor(2, 0.7),
        blind(),
        *(aliased(memory) for memory in (False, True)),
        duplicates(30, 0.8, 0.4),
        duplicates(30, 1.0, 0.0),
        noise(),
        corridor(),
        corridor(lowest=-10.0, name="corridor, -9 or -10"),
        corridor(remembers=True, name="corridor, conversation"),
        corridor(3, 0.0, 0.5, 5, name="corridor, few calls"),
        places("doors", 4, 8),
        places("doors, few calls", 4, 5),
        places("long doors", 8, 14, 4),
        places("bank", 6, 12, 3, 0.6, lambda place: place - place % 2, 2),
        places("tower", 4, 12, 3, 0.6, lambda place: max(0, place - 1)),
        rooms(),
        rooms(remembers=True, name="rooms, conversation"),
        rooms(7, 4, 0.5, seed=1, name="7 x 4 rooms"),
        rooms(certain=True, name="certain rooms"),
        rooms(7, 4, 0.4, True, True, 2, "certain 7 x 4 rooms"),
        team(),
        chain(0.85),
        chain(0.6),
        walk(process=False),
        walk(process=True),
        walk_shown(),
        delayed(),
        lengths(),
        mixed(),
        mixed(0.2),
        bandit(),
    ]
