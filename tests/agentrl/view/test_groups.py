"""Groups in lists: what games show, and how many outcomes fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.types import NewRollout, Outcome, Purpose, Reward, Scope
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.view import front
from agentrl.view.pages import Pages
from agentrl.view.templates import render
from tests import factories

DUEL = [(1.0, -1.0), (1.0, -1.0), (-1.0, 1.0), (1.0, -1.0)]


async def played(
    store: Store, results: list[tuple[float, float]], outcomes: list[float] | None = None
) -> None:
    """A training group of games of two seats. `outcomes`: of the rollouts; by default the mean of
    what the seats got, as where both are trained."""
    await store.open_run("run", {})
    means = outcomes or [sum(both) / 2 for both in results]
    asked = [
        NewRollout(f"run/g/{i:04}", run="run", group="run/g", index=i, task={"input": "deal"})
        for i in range(len(results))
    ]
    await store.enqueue(asked)
    for one in await store.claim(len(asked), runner="t", lease=60.0, run="run", timeout=5.0):
        both, mean = results[one.rollout.index], means[one.rollout.index]
        rows = [Reward(value=mean)]
        rows += [
            Reward(value=value, scope=Scope.ROLE, target=seat)
            for seat, value in zip(("black", "white"), both, strict=True)
        ]
        await store.finish([Outcome(attempt=one.id, fence=one.fence, rewards=rows)])


async def listed(store: Store) -> front.Listed:
    rows = await store.groups("run", purpose=Purpose.TRAIN)
    (found,) = await front.listed(store, "run", rows)
    return found


@pytest.mark.parametrize(
    ("results", "outcomes", "expected", "seat", "share"),
    [
        (DUEL, None, [1.0, 1.0, -1.0, 1.0], "black", False),
        ([(1.0, 0.0), (0.0, 1.0)], None, [1.0, 0.0], "black", True),
        # One seat is trained: the rollout's outcome is its own.
        (DUEL, [-1.0, -1.0, 1.0, -1.0], [-1.0, -1.0, 1.0, -1.0], "", True),
        # A team wins together.
        ([(1.0, 0.5), (0.0, 0.0)], None, [0.75, 0.0], "", True),
        ([(1.0, 1.0), (1.0, 1.0)], None, [1.0, 1.0], "", True),
    ],
)
async def test_a_game_shows_what_a_seat_got(
    tmp_path: Path, results, outcomes, expected: list[float], seat: str, share: bool
) -> None:
    """Where one wins what another loses, the outcomes of rollouts are all alike."""
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await played(store, results, outcomes)
        found = await listed(store)
    assert (found.row.outcomes, found.seat, found.share) == (expected, seat, share)


async def test_a_game_is_not_flat_and_has_numbers(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await played(store, DUEL)
        pages = Pages(store)
        shown = render(await pages.groups("run", {}))
        group = render(await pages.group("run", "run/g"))
        tasks = render(await pages.tasks("run", {"of": "train"}))
    assert "it is what black got" in tasks
    assert '<b class="good">0.5</b>' in tasks
    (row,) = [part for part in shown.split("<tr") if "/group/" in part]
    row = row.partition("</tr>")[0]
    assert ">flat<" not in row
    assert "0.5 <small>black</small>" in row
    assert ">flat<" not in group
    assert '<th class="n">white</th>' in group
    assert '<td class="n strong bad" data-l="black">-1</td>' in group
    assert '<th class="n">outcome</th>' not in group


async def test_equal_games_are_flat(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await played(store, [DUEL[0]] * 4)
        shown = render(await Pages(store).groups("run", {}))
    (row,) = [part for part in shown.split("<tr") if "/group/" in part]
    row = row.partition("</tr>")[0]
    assert ">flat<" in row
    assert "1 <small>black</small>" in row


async def test_a_session_is_listed_by_what_its_user_said(tmp_path: Path) -> None:
    """It has no task but what is known of it, and no step asked for it."""
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run("run", {})
        new = NewRollout(id="run/s", run="run", group="run/s", index=0, task={"lane": "x"}, step=-1)
        await store.enqueue([new])
        (one,) = await store.claim(1, runner="t", lease=60.0, run="run", timeout=5.0)
        said = [
            {"role": "system", "content": "Help."},
            {"role": "user", "content": "Where is 371?"},
        ]
        await store.add_transitions([factories.call("c", attempt=one.id, index=0, messages=said)])
        won = Outcome(attempt=one.id, fence=one.fence, rewards=[Reward(value=1.0)])
        await store.finish([won])
        pages = Pages(store)
        shown = [render(await pages.groups("run", {})), render(await pages.group("run", "run/s"))]
        shown.append(render(await pages.rollout("run/s")))
    assert ">Where is 371?</a>" in shown[0]
    assert "A session" in shown[1]
    assert "<h1>Where is 371?</h1>" in shown[2]
    assert not any("-1<" in page or "/step/-1" in page for page in shown)
