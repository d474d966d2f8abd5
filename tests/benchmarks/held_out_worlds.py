"""More worlds with an exact gradient, written after the default credit was chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .world_list import HALF, first, oks, paid, rooms, to, two
from .worlds import Branch, Node, World


def retries(fails: float = 0.4, limit: int = 6) -> World:
    """The first call plans; the tool fails at random, which says nothing of the plan; after an
    error one retries (0) or gives up."""

    def step(node: Node, a: int) -> list[Branch]:
        t, plan, seen = node
        if seen == "result":
            return paid((0.9, 0.2)[plan])
        if (t > 0 and a == 1) or t == limit:
            return paid(0.1)
        plan = a if t == 0 else plan
        return [(fails, 0.0, (t + 1, plan, "error")), (1 - fails, 0.0, (t + 1, plan, "result"))]

    def policy(node: Node) -> tuple[float, float]:
        return two(0.4) if node[0] == 0 else two(0.7) if node[2] == "error" else HALF

    return World("retried tool", (0, 0, "task"), policy, step, lambda node: node[2], remembers=True)


def search(limit: int = 5, chances: tuple[float, ...] = (0.3, 0.15, 0.05, 0.0)) -> World:
    """Queries that mostly find nothing; who found a page answers right or wrong, at the limit one
    guesses."""

    def step(node: Node, a: int) -> list[Branch]:
        t, found = node
        if found:
            return paid((0.9, 0.6, 0.3, 0.1)[a])
        if t == limit:
            return paid(0.1)
        p = chances[a]
        return [b for b in ((p, 0.0, (t + 1, 1)), (1 - p, 0.0, (t + 1, 0))) if b[0] > 0]

    def sees(node: Node) -> str:
        return "page" if node[1] else "question" if node[0] == 0 else "nothing"

    return World("search", (0, 0), lambda _: (0.25,) * 4, step, sees, remembers=True)


def branching(limit: int = 4) -> World:
    """A search whose right topic is chosen at first, whose narrower query then finds the page; the
    other results are empty, and the last call sees nothing but whether there is a page."""

    def step(node: Node, a: int) -> list[Branch]:
        t, topic, found = node
        if t == limit:
            return paid(0.95 if found else 0.05)
        topic = a if t == 0 else topic
        p = 0.6 if t > 0 and topic == 0 and a == 0 else 0.0
        hit = [(p, 0.0, (t + 1, topic, 1))] if p and not found else []
        return [*hit, (1 - p if hit else 1.0, 0.0, (t + 1, topic, found))]

    def sees(node: Node) -> str:
        return "question" if node[0] == 0 else "page" if node[2] else "nothing"

    policy = (0.4, 0.3, 0.3)
    return World("search by topic", (0, 0, 0), lambda _: policy, step, sees, remembers=True)


def budget(money: int, visible: bool) -> World:
    """A dear call (2) finds the answer one time in two, a cheap one (1) one in ten, until the
    money is gone; what is left is worth a bit."""

    def step(node: Node, a: int) -> list[Branch]:
        t, left = node
        cost, p = ((2, 0.5), (1, 0.1))[a]
        left -= cost
        if left < 0:
            return paid(0.0)
        after = (0.0, None) if left == 0 else (0.0, (t + 1, left))
        return [(p, 1.0 + 0.05 * left, None), (1 - p, *after)]

    def sees(node: Node) -> int | str:
        return node[1] if visible else "not found" if node[0] else "task"

    name = "budget" if visible else "budget, not shown"
    return World(name, (0, money), lambda _: HALF, step, sees, recurring=visible,
                 remembers=not visible)  # fmt: skip


def jackpot(seen: bool) -> World:
    """The first call makes a rare outcome of 10 three times as likely, others are about 0; the last
    state shows it or not."""

    def step(node: Node, a: int) -> list[Branch]:
        t, way = node
        p = {0: 0.12, 1: 0.04, "big": 1.0, "small": 0.0}[way]
        if t == 2:
            return [(chance / 2, pay + by, None) for chance, pay in ((p, 10.0), (1 - p, 0.0))
                    for by in (-0.2, 0.2) if chance > 0]  # fmt: skip
        if t == 0:
            return to((1, a))
        return [(p, 0.0, (2, "big")), (1 - p, 0.0, (2, "small"))] if seen else to((2, way))

    def sees(node: Node) -> tuple[int, object]:
        return (node[0], node[1] if seen and node[0] == 2 else "")

    name = "jackpot, seen" if seen else "jackpot"
    return World(name, (0, 0), first(0.5), step, sees, remembers=True)


def difficulties(base: World, name: str, chances: tuple[float, ...] = (1.0, 0.5, 0.1)) -> World:
    """A world whose success is worth less in two of three groups, of which the policy and the
    states know nothing."""

    def step(node: Node, a: int) -> list[Branch]:
        t, chance, *rest = node
        out: list[Branch] = []
        for p, pay, after in base.step((t, *rest), a):
            if after is None and pay > 0:
                out += [(p * chance, pay, None), (p * (1 - chance), 0.0, None)]
            else:
                out.append((p, pay, after and (after[0], chance, *after[1:])))
        return [branch for branch in out if branch[0] > 0]

    def bare(of: Callable[[Node], object]) -> Callable[[Node], object]:
        return lambda node: of((node[0], *node[2:]))

    return replace(base, name=name, step=step, sees=bare(base.sees), policy=bare(base.policy),
                   tasks=tuple((0, chance, *base.start[1:]) for chance in chances))  # fmt: skip


def opposed() -> World:
    """The first action is right in two of three tasks, wrong in the third; then "ok"s."""

    def step(node: Node, a: int) -> list[Branch]:
        t, right, way = node
        return paid(way == right) if t == 4 else to((t + 1, right, a if t == 0 else way))

    def sees(node: Node) -> str:
        return "task" if node[0] == 0 else "ok" if node[0] < 4 else f"end {node[1] == node[2]}"

    tasks = ((0, 0, 0), (0, 0, 1), (0, 1, 0))
    return World("opposed tasks", tasks[0], first(0.5), step, sees, tasks=tasks, remembers=True)


def two_bits(joint: bool) -> World:
    """Two calls decide, with "ok"s between: each for a half, or only both."""

    def step(node: Node, a: int) -> list[Branch]:
        t, one, other = node
        one, other = a if t == 0 else one, a if t == 2 else other
        if t < 5:
            return to((t + 1, one, other))
        good = (one == 0) + (other == 0)
        return [(1.0, float(good == 2) if joint else good / 2, None)]

    def sees(node: Node) -> str:
        return "task" if node[0] == 0 else "ok" if node[0] < 5 else f"end {node[1:]}"

    name = "two bits, both" if joint else "two bits"
    return World(name, (0, 0, 0), lambda _: two(0.4), step, sees, remembers=True)


def one_branch(depth: int = 4) -> World:
    """One way leads through states that show progress, the other through "ok"s that hide a
    choice."""

    def step(node: Node, a: int) -> list[Branch]:
        t, way, x = node
        way = a if t == 0 else way
        x += a == 0 and (way == 0 or t == 1) and t > 0
        if t < depth:
            return to((t + 1, way, x))
        return paid(x / depth if way == 0 else (0.2, 0.9)[x])

    def sees(node: Node) -> tuple[object, ...]:
        t, way, x = node
        return (t,) if t == 0 else (t, x) if way == 0 else ("ok",)

    return World("one branch shows", (0, 0, 0), lambda _: HALF, step, sees, remembers=True)


def stopping(target: int = 4, bust: float = 0.2) -> World:
    """Go on (0) for a point, at the risk of losing all, or stop with the points."""

    def step(node: Node, a: int) -> list[Branch]:
        t, x = node
        if a == 1:
            return [(1.0, x / target, None)]
        more: Branch = (1 - bust, 1.0, None) if x + 1 == target else (1 - bust, 0.0, (t + 1, x + 1))
        return [more, (bust, 0.0, None)]

    return World("when to stop", (0, 1), lambda _: two(0.8), step, lambda node: node[1],
                 recurring=True)  # fmt: skip


def misread(right: float = 0.7, depth: int = 4) -> World:
    """Two rooms, good and bad, whose sign is misread; action 0 mostly leads to the good one, and a
    stay there at the end pays."""

    def step(node: Node, a: int) -> list[Branch]:
        t, good, _ = node
        if t == depth:
            return paid(0.9 if good else 0.2)
        p = (0.8, 0.3)[a] if not good else (0.9, 0.6)[a]
        return [(q * r, 0.0, (t + 1, g, s)) for g, q in ((1, p), (0, 1 - p))
                for s, r in ((g, right), (1 - g, 1 - right))]  # fmt: skip

    return World("misread rooms", (0, 0, 0), lambda _: HALF, step, lambda n: (n[0], n[2]),
                 remembers=True)  # fmt: skip


def bonus(seen: bool) -> World:
    """Rooms that tell most of the outcome, and a first call whose bonus of .4 they do not tell;
    the last state shows it or not."""
    inner = rooms(5, seed=0, certain=True)

    def step(node: Node, a: int) -> list[Branch]:
        t, got, x = node
        got = a == 0 if t == 0 else got
        return [(p, pay + 0.4 * got if after is None else 0.0, after and (after[0], got, after[1]))
                for p, pay, after in inner.step((t, x), a)]  # fmt: skip

    def sees(node: Node) -> Node:
        return node if seen and node[0] == 4 else (node[0], node[2])

    return World("rooms and a bonus" + (", seen" if seen else ""), (0, False, 0), lambda _: HALF,
                 step, sees, lambda n: (n[0], n[2]), remembers=True)  # fmt: skip


def trap(depth: int = 5) -> World:
    """A corridor of rooms that show progress; a wrong first call makes progress worth nothing,
    which the state before the last call shows."""

    def step(node: Node, a: int) -> list[Branch]:
        t, good, x = node
        good = a == 0 if t == 0 else good
        x += a == 0 and t > 0
        return paid(x / depth if good else 0.0) if t == depth else to((t + 1, good, x))

    def sees(node: Node) -> tuple[object, ...]:
        t, good, x = node
        return (t, x, good) if t >= depth - 1 else (t, x)

    return World("trap", (0, True, 0), lambda _: two(0.6), step, sees, lambda n: (n[0], n[2]),
                 remembers=True)  # fmt: skip


def rare(p: float = 0.03) -> World:
    """Success is rare, after "ok"s, and a first call makes it likelier."""

    def step(node: Node, a: int) -> list[Branch]:
        t, way = node
        return paid((3 * p, p)[way]) if t == 3 else to((t + 1, a if t == 0 else way))

    return World("rare success", (0, 0), first(0.5), step, lambda n: "ok" if n[0] else "task",
                 remembers=True)  # fmt: skip


def menu(actions: int = 10) -> World:
    """Three calls of ten actions each; every right one adds a third, seen at once."""

    def step(node: Node, a: int) -> list[Branch]:
        t, good = node
        good += a == 0
        return [(1.0, good / 3, None)] if t == 2 else to((t + 1, good))

    return World("ten actions", (0, 0), lambda _: (0.1,) * 10, step, lambda node: node,
                 recurring=True)  # fmt: skip


def hidden_plan() -> World:
    """A planner's choice is right if the worker's agrees, who does not see it; the planner sees the
    result and reports."""

    def step(node: Node, a: int) -> list[Branch]:
        t, plan, done = node
        plan, done = a if t == 0 else plan, a if t == 1 else done
        return paid((0.9, 0.1)[plan != done]) if t == 4 else to((t + 1, plan, done))

    def sees(node: Node) -> str:
        return ("task", "work", "ok", "ok", f"result {node[1] == node[2]}")[node[0]]

    def role(node: Node) -> str:
        return "worker" if node[0] == 1 else "planner"

    return World("planner and worker", (0, 0, 0), lambda _: two(0.7), step, sees, role=role,
                 remembers=True)  # fmt: skip


def sure(base: World, p: float = 0.97) -> World:
    """A policy that nearly always takes the first action."""
    return replace(base, name=f"{base.name}, sure", policy=lambda _: two(p))


def all_worlds() -> list[World]:
    return [
        retries(),
        search(),
        branching(),
        budget(6, visible=True),
        budget(6, visible=False),
        replace(oks(4), texts=True, name="ok x 4, unique texts"),
        replace(rooms(certain=True), texts=True, name="certain rooms, unique texts"),
        jackpot(seen=False),
        jackpot(seen=True),
        difficulties(oks(4), "ok x 4, tasks differ"),
        difficulties(rooms(certain=True), "certain rooms, tasks differ"),
        opposed(),
        two_bits(joint=False),
        two_bits(joint=True),
        one_branch(),
        stopping(),
        misread(),
        bonus(seen=False),
        bonus(seen=True),
        trap(),
        rare(),
        menu(),
        hidden_plan(),
        sure(oks(4)),
        sure(rooms(certain=True)),
    ]
