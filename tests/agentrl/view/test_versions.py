"""The page of versions in `agentrl view`: what it says, and how it looks in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.live.records import Compared, Event, EventKind, Lanes, LiveState, Version
from agentrl.store import open_store
from agentrl.view.pages import Pages
from agentrl.view.templates import render
from agentrl.view.versions import Phase, bar_of, phases, rows_of
from tests.agentrl.live.promotion.played import RUN, Shop, config
from tests.agentrl.view import filled
from tests.agentrl.view.conftest import chromium as chromium
from tests.agentrl.view.conftest import new_page as new_page


def event(at: float, kind: EventKind, version: int, **lanes: Any) -> Event:
    return Event(time=at, kind=kind, version=version, lanes=Lanes(**lanes), why=kind)


STORY = [
    event(0.0, "first", 0, serving=0),
    event(20.0, "candidate", 2, serving=0, candidate=2),
    event(40.0, "promoted", 2, serving=2, previous=0),
    event(60.0, "candidate", 5, serving=2, previous=0, candidate=5),
    event(50.0, "rolled back", 5, serving=2, previous=0),  # the clock was set back
]


def test_phases_are_where_a_version_served() -> None:
    found = phases(STORY, 100.0)
    assert found[0] == [Phase("serving", 0.0, 40.0)]
    assert found[2] == [Phase("candidate", 20.0, 20.0), Phase("serving", 40.0, 60.0)]
    assert found[5] == [Phase("candidate", 60.0, 0.4)]


def test_rows_say_what_a_version_is_now() -> None:
    offered = {7: Version(version=7, step=7, path="made", offered=0.0)}
    rows = rows_of(LiveState(events=STORY, versions=offered), 100.0)
    assert [(row.version, row.state, row.share) for row in rows] == [
        (7, "offered", 0.0), (5, "rolled back", 0.0), (2, "serving", 1.0), (0, "served before", 0.0)
    ]  # fmt: skip


def test_the_interval_is_drawn_around_zero() -> None:
    known: dict[str, Any] = {"version": 1, "serving": 0, "time": 0.0, "means": (None, None)}
    assert bar_of(Compared(low=-1.0, high=1.0, sessions=(0, 0), **known)) is None
    bar = bar_of(Compared(low=-0.05, high=0.2, sessions=(9, 9), **known))
    assert bar == {"x": 150 - 145 / 4, "width": 145 * 1.25, "shows": ""}
    better = bar_of(Compared(low=0.05, high=0.2, sessions=(9, 9), **known))
    assert (better or {})["shows"] == "better"


async def fill(folder: Path) -> None:
    """One version promoted, one rolled back, and one that is compared."""
    settings = config(folder, wait=0.0, share=0.5, running=True)
    async with open_store(settings.store) as store:
        live = Shop(store, settings)
        live.now -= 400
        await live.opened(0, 4)
        await store.open_run(RUN, {"name": RUN, "live": {"running": True}})
        for _ in range(80):
            lane, _ = await live.seated()
            live.now += 1
            await live.session(0.9 if lane == "candidate" else 0.1, lane=lane, thumb=1.0)
        await live.decided()
        live.now += 100
        for version, said in ((6, ""), (8, "Yes.")):
            await live.offer(version)
            for number in range(30):
                await live.decided()
                if (await live.lanes()).candidate is not None:
                    live.now += 2
                    await live.session((number % 3) / 2, said=said, thumb=0.5)
        await live.offer(9, kind="offered by hand")


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("live")
    filled.finish(fill(folder))
    process, address = filled.start(f"sqlite:///{folder}/store.db")
    yield address.rstrip("/")
    filled.stop(process)


async def test_the_page_tells_lanes_and_reasons(tmp_path: Path) -> None:
    await fill(tmp_path)
    async with open_store(f"sqlite:///{tmp_path}/store.db", readonly=True) as store:
        pages = Pages(store)
        text = render(await pages.versions(RUN))
        assert "95\u202f%" in text
        assert "Version 4 serves and version 8 is its candidate" in text
        assert "its sessions are better: by " in text
        assert "calls failed, 0% with version 4" in text
        assert '<tr><td>thumb</td><td class="n">50' in text
        link = f'href="/versions/{RUN}">Versions<'
        assert link in render(await pages.run(RUN, {}))


async def test_a_run_that_serves_nothing_yet_says_so(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run(RUN, {})
        pages = Pages(store)
        assert "No version is served yet" in render(await pages.versions(RUN))
        assert "/versions/" not in render(await pages.run(RUN, {}))


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_axe_finds_nothing(
    viewed: str, new_page: Callable[..., Any], size: tuple[int, int], scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = new_page(color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto(f"{viewed}/run/{RUN}")
    page.click("text=Versions")
    page.wait_for_url(f"**/versions/{RUN}")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.locator(".lane").count() == 5
    options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    broken = axe.Axe().run(page, options=options).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in broken] == []
