"""How long `agentrl view` takes, from the store's disk to the reader's eye.

python -m tests.benchmarks.view --json [--quick] [--home] [--keep FILE] [--postgres URL] [--tabs N]

Pages and searches are timed over HTTP on the store of `view_store`: 1.0 M calls of 400,000
rollouts, with `--quick` 25,000; the file itself, then a store server in front of it (`http`), then
a copy of it in an empty PostgreSQL database. `home` is the list of 100 runs in 20 stores, of which
one changes before every visit, and alone with `--home`. A store of its own has a hard rollout (60
calls, 24,000 tokens, 1.2 MB of tool output), and a run on which the time from a commit until
Chromium shows it is measured. `--tabs` trains the example agent in pairs, without and with three
tabs open on it in one window, of which a browser shows one, and compares the seconds of their
steps.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from agentrl.core.types import NewRollout, float32, int32
from agentrl.store import open_store
from tests.agentrl.view import filled
from tests.benchmarks import view_home, view_store
from tests.benchmarks.report import arguments
from tests.store.http.test_client import free_port

CALLS, TOKENS, OUTPUT = 60, 400, 20_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
HARD = "run/hard/0"
INTERACTIVE = """() => {
  for (const ids of document.querySelectorAll(".ids")) ids.open = true;  // no tokenizer: folded
  return performance.now() * (document.querySelectorAll(".tokens span").length > 0);
}"""
STEP = "shown => document.querySelector('.tiles dd').textContent === shown"


async def make_hard(url: str, folder: Path) -> None:
    await filled.fill(url, folder, None, steps=1)
    async with open_store(url) as store:
        new = NewRollout(id=HARD, run="run", group="run/hard", index=0, task={}, priority=9)
        await store.enqueue([new])
        (attempt,) = await store.claim(1, runner="bench", lease=600.0, run="run", timeout=5.0)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for at in range(CALLS):
            tokens = int32(200 + (at * 7 + i) % 250 for i in range(TOKENS))
            logprobs = float32(-((i * 37 % 100) / 50) for i in range(TOKENS))
            more = {"prompt": int32([1]), "completion": tokens, "logprobs": logprobs}
            call = filled.call(attempt, at, messages, **more)
            await store.add_transitions([call])
            tool = {"role": "tool", "content": f"{at} " + "row " * (OUTPUT // 4)}
            messages = [*messages, call.answer or {}, tool]


def p95(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))]


def timed(client: httpx.Client, paths: list[str]) -> list[float]:
    found = []
    for path in paths:
        since = time.perf_counter()
        client.get(path).raise_for_status()
        found.append(time.perf_counter() - since)
    return found


def pages(url: str, *, quick: bool) -> dict[str, Any]:
    """Milliseconds of every page and search, p95 of repeats with other arguments."""
    process, address = filled.start(url)
    last, repeats = view_store.QUICK if quick else view_store.STEPS, 5 if quick else 20
    steps = [last - 1 - i * 7 % last for i in range(repeats)]
    groups = [f"run/train/{step * view_store.GROUPS:07d}" for step in steps]
    every = {
        "runs": ["/"] * repeats,
        "run": ["/run/run"] * repeats,
        "step": [f"/step/{step}/run" for step in steps],
        "groups": [f"/groups/run?before={group}" for group in groups],
        "group": [f"/group/{group}?run=run" for group in groups],
        "rollout": [f"/rollout/{group}/0003" for group in groups],
        "tokens": [f"/tokens/{group}/0003?call=0&call=1" for group in groups],
        "compare": [f"/compare?a={group}/0003&b={group}/0001" for group in groups],
        "policies": ["/policies/run"] * repeats,
    }
    searches = ["low=0.5", "low=2", "state=failed", "state=cancelled", "role=nobody", "version=7"]
    searches += ["from=10&to=20", "text=Porto", "text=zebra42"]
    with httpx.Client(base_url=address, timeout=60) as client:
        timed(client, [paths[0] for paths in every.values()])
        page_ms = {name: 1000 * p95(timed(client, paths)) for name, paths in every.items()}
        search_ms = {
            query: 1000 * max(timed(client, [f"/find/run?{query}"] * 3)) for query in searches
        }
    filled.stop(process)
    worst = {"page_p95_ms": max(page_ms.values()), "search_ms": max(search_ms.values())}
    return worst | {"pages": page_ms, "searches": search_ms}


def reader(url: str, browser: Any, commits: int) -> dict[str, Any]:
    """What one reader of the hard rollout and of a growing run sees."""
    since = time.perf_counter()
    process, address = filled.start(url)
    httpx.get(address).raise_for_status()
    found: dict[str, Any] = {"start_s": time.perf_counter() - since}
    first = httpx.get(f"{address}rollout/{HARD}", headers={"accept-encoding": "identity"})
    found["first_kb"] = len(first.content) / 1000
    page, opened = browser.new_page(), []
    for _ in range(5):
        page.goto("about:blank")
        page.goto(f"{address}rollout/{HARD}", wait_until="commit")
        opened.append(page.wait_for_function(INTERACTIVE).json_value() / 1000)
    found["interactive_s"] = statistics.median(opened)
    page.click("text=none")
    page.click("text=probability")
    recolour = "performance.getEntriesByName('recolour').map(e => e.duration)"
    found["recolour_ms"] = max(page.evaluate(recolour))
    page.goto(f"{address}run/run")
    page.wait_for_timeout(1000)
    shown = []
    for n in range(1, commits + 1):
        filled.finish(grow(url, n))
        since = time.perf_counter()
        page.wait_for_function(STEP, arg=str(n + 1))
        shown.append(time.perf_counter() - since)
    found["shown_p95_s"] = p95(shown)
    found["rss_mb"] = psutil.Process(process.pid).memory_info().rss / 1e6
    page.close()
    filled.stop(process)
    return found


def train(folder: Path) -> subprocess.Popen[bytes]:
    """Start a training of the example agent that evaluates nothing."""
    command = [sys.executable, "-m", "agentrl", "train", "examples/staff/run.toml", "eval.every=0"]
    command += ["eval.tasks=1", "eval.samples=0", "steps=15", f"output={folder}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


@contextmanager
def three_tabs(page: str, profile: Path) -> Iterator[None]:
    """A page three times in one window. Nothing drives the browser meanwhile, as that would make
    all tabs visible and take part of the processors."""
    port = free_port()
    command = [str(filled.CHROMIUM), "--headless=new", f"--remote-debugging-port={port}", *FLAGS]
    browser = subprocess.Popen(
        [*command, "--no-first-run", f"--user-data-dir={profile}", page], stderr=subprocess.DEVNULL
    )
    address, retried = f"http://127.0.0.1:{port}/json/", httpx.HTTPTransport(retries=9)
    try:
        with httpx.Client(base_url=address, transport=retried) as control:
            for _ in range(2):
                control.put(f"new?{page}").raise_for_status()
            yield
            opened = [each["url"] for each in control.get("list").json() if each["type"] == "page"]
            assert opened == [page] * 3, opened
    finally:
        browser.terminate()
        browser.wait()


def step_seconds(folder: Path, *, tabs: bool) -> list[float]:
    """Seconds of a training's steps but the first ones."""
    url, process = f"sqlite:///{folder / 'store.db'}", train(folder)
    while process.poll() is None and not (folder / "store.db").exists():
        time.sleep(0.2)
    with ExitStack() as stack:
        if tabs:
            viewer, address = filled.start(url)
            stack.callback(filled.stop, viewer)
            stack.enter_context(three_tabs(f"{address}run/staff", folder / "browser"))
        assert process.wait() == 0, "the training failed"

    async def ends() -> list[float]:
        async with open_store(url, readonly=True) as store:
            return [row.at for row in await store.steps("staff")]

    at = filled.finish(ends())
    return [after - before for before, after in itertools.pairwise(at)][2:]


def compare_tabs(folder: Path, pairs: int) -> dict[str, Any]:
    """Median seconds of a step without and with three tabs, and their ratio over all pairs."""
    without, with_tabs = [], []
    for i in range(pairs):
        without += step_seconds(folder / f"without{i}", tabs=False)
        with_tabs += step_seconds(folder / f"with{i}", tabs=True)
    before, after = statistics.median(without), statistics.median(with_tabs)
    return {"step_s": before, "step_three_tabs_s": after, "tabs_ratio": after / before}


async def grow(url: str, n: int) -> None:
    async with open_store(url) as store:
        state = await store.run("run")
        assert state is not None
        await filled.step(store, "run", state.epoch, n)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small store, few repeats")
    parser.add_argument("--keep", type=Path, help="make the large store here, or use the one there")
    parser.add_argument("--postgres", help="an empty PostgreSQL database, to time that too")
    parser.add_argument("--tabs", type=int, default=0, help="pairs of trainings, 3 minutes each")
    parser.add_argument("--home", action="store_true", help="time only the list of 100 runs")
    options = parser.parse_args()
    if options.home:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps({"home": view_home.measure(Path(name))}))
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large = (options.keep or folder / "large.db").absolute()
        if not large.exists():
            view_store.fill(large, quick=options.quick)
        result = pages(f"sqlite:///{large}", quick=options.quick)
        result["home"] = view_home.measure(folder / "home")
        with view_store.served(f"sqlite:///{large}") as address:
            result["http"] = pages(address, quick=options.quick)
        if options.postgres:
            view_store.copy_to_postgres(large, options.postgres)
            result["postgres"] = pages(options.postgres, quick=options.quick)
        url = f"sqlite:///{folder / 'hard.db'}"
        asyncio.run(make_hard(url, folder))
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=filled.CHROMIUM, args=FLAGS)
            result |= reader(url, chromium, 5 if options.quick else 40)
            chromium.close()
        result |= compare_tabs(folder, options.tabs) if options.tabs else {}
    print(json.dumps(result, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
