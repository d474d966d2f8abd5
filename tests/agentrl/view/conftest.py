"""A filled store, the server of `agentrl view` as a process, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agentrl.view import filled
from tests.agentrl.view.filled import CHROMIUM, start, stop

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


@pytest.fixture(scope="session")
def filled_store(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> str:
    folder = tmp_path_factory.mktemp("view")
    url = f"sqlite:///{folder / 'store.db'}"
    filled.finish(filled.fill(url, folder, tiny_model_dir))
    filled.finish(filled.fill_data(url))
    filled.finish(filled.fill_search(url, folder))
    return url


@pytest.fixture(scope="session")
def viewed(filled_store: str) -> Iterator[str]:
    process, address = start(filled_store)
    yield address.rstrip("/")
    stop(process)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Headless Chromium; the test is skipped where there is none. Never downloads one."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page in a context of its own. At the end no page may have had an error."""
    contexts, errors = [], []

    def open_(**options: Any) -> Any:
        context = chromium.new_context(viewport={"width": 1400, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: m.type == "error" and errors.append(m.text))
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not errors
