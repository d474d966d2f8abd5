"""Show a rollout or a run in Jupyter, with the templates of the pages."""

from __future__ import annotations

import asyncio
import html
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrl.base.images import data_url
from agentrl.run_stores import store_with
from agentrl.store import open_store
from agentrl.view.pages import Page, Pages
from agentrl.view.templates import EXPORTED, STATIC, render

LARGEST_IMAGES = 8_000_000  # bytes of all images of a page, which the notebook's file has inside


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


def show(name: str, *, store: str | None = None, call: int = 0) -> Shown:
    """Show a rollout, by an id such as staff/train/g0000007/0003, or a run with its curves, by its
    name, in a notebook. `store`: URL; default: the one that has the run, below the working
    directory. `call`: of a rollout with many calls, one of those on the page.

    Raises StoreError if the store has neither."""
    with ThreadPoolExecutor(1) as pool:  # a notebook's own event loop is running in this thread
        url = store or pool.submit(store_with, name).result()
        page, values, images = pool.submit(asyncio.run, _read(url, name, call)).result()
    style = (STATIC / "view.css").read_text()
    given: Any = {"style": style, "values_of": values, "image_urls": images}
    document = render(page, layout="notebook.html", export=True, **given)
    return Shown(page.title, document, 620)


async def _read(url: str, name: str, call: int) -> tuple[Page, dict[str, Any], dict[str, str]]:
    """A page, the values of its tokens, and its images as data URLs."""
    async with open_store(url, readonly=True) as store:
        pages, values = Pages(store), dict[str, Any]()
        if await store.run(name) is not None:
            page = await pages.run(name, {})
        else:
            page = await pages.rollout(name, {"call": str(call)})
            paging = page.values["paging"]
            values = await pages.tokens(name, range(paging.first, paging.end))
        run, images, left = page.values["run"], dict[str, str](), LARGEST_IMAGES
        shown = EXPORTED.findall(render(page, layout="bare.html", export=True))
        async for image in pages.album.files(run, list(dict.fromkeys(shown))):
            if (left := left - len(image.body)) >= 0:
                images[image.digest] = data_url(image)
        return page, values, images
