"""Show a rollout or a run in Jupyter, with the templates of the pages."""

from __future__ import annotations

import asyncio
import html
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrl.config import store_with
from agentrl.store import open_store
from agentrl.view.pages import Page, Pages
from agentrl.view.templates import STATIC, render


class Shown:
    """An HTML document that notebooks render; `html` is its source."""

    def __init__(self, title: str, document: str, height: int) -> None:
        self.title, self.html, self._height = title, document, height

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _repr_html_(self) -> str:
        """An iframe without scripts, which isolates the style and the agents' texts."""
        return (
            f'<iframe sandbox srcdoc="{html.escape(self.html)}" title="{html.escape(self.title)}" '
            f'width="100%" height="{self._height}" style="border:0;resize:vertical"></iframe>'
        )


def show(name: str, *, store: str | None = None) -> Shown:
    """Show a rollout, by an id such as staff/train/0000007/0003, or a run with its curves, by its
    name, in a notebook. `store`: URL; default: the one that has the run, below the working
    directory.

    Raises StoreError if the store has neither."""
    with ThreadPoolExecutor(1) as pool:  # a notebook's own event loop is running in this thread
        url = store or pool.submit(store_with, name).result()
        page, values = pool.submit(asyncio.run, _read(url, name)).result()
    style = (STATIC / "view.css").read_text()
    document = render(page, layout="notebook.html", export=True, style=style, values_of=values)
    return Shown(page.title, document, 620)


async def _read(url: str, name: str) -> tuple[Page, dict[str, Any]]:
    async with open_store(url, readonly=True) as store:
        pages = Pages(store)
        if await store.run(name) is not None:
            return await pages.run(name, {}), {}
        page = await pages.rollout(name)
        return page, await pages.tokens(name, range(len(page.values["calls"])))
