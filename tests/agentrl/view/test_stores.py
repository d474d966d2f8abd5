"""A page shows the same whether its store is a file, PostgreSQL or a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.store import open_store
from agentrl.view.pages import Pages
from agentrl.view.server import Home
from agentrl.view.templates import render
from tests.agentrl.view import filled
from tests.store.conftest import _serving

BETTER = filled.CANDIDATES[1]


async def shown(url: str, folder: Path) -> list[str]:
    """Pages of a filled store, without the times at which it was filled."""
    await filled.fill(url, folder, None, steps=4)
    await filled.fill_data(url)
    await filled.fill_search(url, folder)
    async with open_store(url, readonly=True) as store:
        pages, home = Pages(store), Home([url])
        found = [
            await home.runs({}),
            await pages.run("run", {}),
            await pages.groups("run", {}),
            await pages.find("run", {"role": "critic"}),
            await pages.rollout("run/train/g0000003/0001"),
            await pages.data("likes", {}),
            await pages.data("likes", {"split": "test", "version": "2"}),
            await pages.prompts("search"),
            await pages.prompt("search", BETTER),
        ]
        await home.close()
    times = re.compile(r'\d+\u202f\w+|\d+ \w+ ago|\d+\.\d\d s\b|<td class="n"[^>]*>\d+\.\d\d</td>')
    return [times.sub("", render(page)) for page in found]


@pytest.fixture(params=["postgres", "http"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgres":
        yield request.getfixturevalue("postgres")()
    else:
        with _serving(f"sqlite:///{tmp_path / 'other.db'}") as address:
            yield address


async def test_pages_of_every_store_are_the_same(url: str, tmp_path: Path) -> None:
    expected = await shown(f"sqlite:///{tmp_path / 'store.db'}", tmp_path)
    for one, other in zip(expected, await shown(url, tmp_path), strict=True):
        assert one == other


async def test_a_key_for_one_run_hides_data_sets(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    await filled.fill(url, tmp_path, None, steps=4)
    await filled.fill_data(url)
    with _serving(url, keys="reader@run:secret-of-run") as address:
        own = address.replace("http://", "http://secret-of-run@")
        async with open_store(own, readonly=True) as store:
            page = await Pages(store).run("run", {})
    assert page.values["datasets"] == []
