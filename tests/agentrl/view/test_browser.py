"""`agentrl view` and its export in Chromium, as a person uses them.

With AGENTRL_SCREENSHOTS=FOLDER the pages of the README are drawn into that folder from the store of
`make demo`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.types import ErrorKind, Failure, NewRollout, Outcome, Purpose
from agentrl.store import open_store
from agentrl.view.export import export
from tests.agentrl.view import filled
from tests.agentrl.view.filled import finish, start, stop

ROLLOUT = "run/train/g0000003/0000"
PAGES = [
    "/", "/runs?run=run&run=other", "/run/run", "/step/3/run", "/groups/run",
    "/group/run/train/g0000003?run=run", f"/rollout/{ROLLOUT}", "/rollout/run/train/g0000003/0003",
    f"/attempts/{ROLLOUT}", f"/lanes/{ROLLOUT}", f"/call/0/{ROLLOUT}", "/find/run",
    f"/compare?a={ROLLOUT}&b=run/train/g0000003/0001", "/policies/run", "/data/likes",
    "/data/likes?after=9", "/prompts/search", "/tasks/run?of=train",
    f"/prompt/{filled.CANDIDATES[1]}?run=search", "/run/none",
]  # fmt: skip
NewPage = Callable[..., Any]
PHONE = {"width": 390, "height": 844}
MANY = 64  # rollouts, as many as have bars


@pytest.fixture
def growing(tmp_path: Path, tiny_model_dir: Path) -> Iterator[tuple[str, Callable[[int], None]]]:
    """A server, and a way to commit one more step of its store's run."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    finish(filled.fill(url, tmp_path, tiny_model_dir, steps=2))
    process, address = start(url)

    async def commit(n: int) -> None:
        async with open_store(url) as store:
            state = await store.run("run")
            assert state is not None
            await filled.step(store, "run", state.epoch, n)

    yield address.rstrip("/"), lambda n: finish(commit(n))
    stop(process)


def wait(page: Any, expression: str) -> None:
    """Until it is true. The page's policy forbids Playwright's own way, which is eval."""
    for _ in range(150):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(expression)


def boxes(page: Any, selector: str) -> Any:
    """Where elements lie at one moment: pages scroll smoothly, and charts push them down."""
    return page.eval_on_selector_all(selector, "all => all.map(a => a.getBoundingClientRect())")


def test_from_the_curve_to_the_token(viewed: str, new_page: NewPage) -> None:
    page = new_page()
    page.goto(f"{viewed}/run/run")
    plot = page.locator('.chart[data-name="reward/mean"] .u-over')
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] * 0.6, "y": 40})  # after 4 steps, of 1 to 6
    assert "at 4" in page.locator('.chart[data-name="reward/mean"] .now').inner_text()
    assert "at 4" in page.locator('.chart[data-name="grad_norm"] .now').inner_text()  # one cursor
    plot.click(position={"x": box["width"] * 0.6, "y": 40})
    page.wait_for_url("**/step/4/run")
    page.click('a[title="run/train/g0000003"]')
    page.click('td a:text-is("0000")')
    page.wait_for_selector(".tokens span")
    page.hover(".tokens span:nth-child(6)")
    inspector = page.locator("#inspector").inner_text()
    assert re.search(r"psi.*\n?\s*0\.555556", inspector)
    assert re.search(r"log-prob\s*-0\.06", inspector)
    page.go_back()
    page.wait_for_url("**/group/**")


def test_tokens_are_painted_by_what_is_chosen(viewed: str, new_page: NewPage) -> None:
    page = new_page()
    page.goto(f"{viewed}/rollout/{ROLLOUT}")
    page.wait_for_selector(".tokens span")
    page.click("text=push ψ")
    classes = page.eval_on_selector_all(
        "[data-call='0'] span", "all => all.map(e => e.className.trim())"
    )
    assert classes[0] == ""  # psi is 0
    assert classes[-1] == "u8"
    page.click("text=advantage >> nth=0")
    first = page.locator("[data-call='0'] span").first
    first.hover()
    assert "not in the loss" in page.locator("#inspector").inner_text()  # NaN, which is not 0


def test_filters_and_pages_without_repeats_while_rows_arrive(
    growing: Any, new_page: NewPage
) -> None:
    address, commit = growing
    for n in range(2, 16):
        commit(n)
    page = new_page()
    page.goto(f"{address}/find/run?to=16")
    found = page.eval_on_selector_all("td a", "all => all.map(a => a.title)")
    commit(16)
    while more := page.query_selector("a[rel=next]"):
        page.goto(address + "/find/run" + more.get_attribute("href"))
        found += page.eval_on_selector_all("td a", "all => all.map(a => a.title)")
    expected = {f"run/train/g{n:07}/{i:04}" for n in range(16) for i in range(4)}
    expected.add("run/queued/0")
    assert len(found) == len(set(found))
    assert set(found) == expected
    page.select_option("[name=state]", "failed")
    page.fill("[name=from]", "4")
    page.fill("[name=to]", "5")
    page.click("button:text-is('Find')")
    page.wait_for_url("**state=failed**")
    found = page.eval_on_selector_all("td a", "all => all.map(a => a.title)")
    assert sorted(found) == ["run/train/g0000003/0003", "run/train/g0000004/0003"]


def test_pages_are_live_in_eight_tabs(growing: Any, new_page: NewPage, chromium: Any) -> None:
    address, commit = growing
    first = new_page()
    tabs = [first, *(first.context.new_page() for _ in range(7))]
    for tab in tabs:
        tab.goto(f"{address}/run/run", timeout=10_000)
    first.bring_to_front()
    commit(2)
    for tab in (first, tabs[-1]):
        tab.bring_to_front()
        wait(tab, "document.querySelector('.tiles dd').textContent === '3'")
        wait(tab, "document.querySelector('[data-live=groups]').innerHTML.includes('g0000002')")
        wait(tab, "[...charts.values()][0].lines[0].at(-1)[0] === 2")


def test_pairs_and_prompts_lead_to_rollouts(viewed: str, new_page: NewPage) -> None:
    page = new_page()
    page.goto(f"{viewed}/run/run")
    page.click("text=Data set likes")
    page.wait_for_selector("#item-0 .sides .card")
    page.wait_for_load_state()  # with its styles
    left, right = boxes(page, "#item-0 .sides .card")
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    page.click("#item-0 >> text=Compare by tokens")
    page.wait_for_url("**/compare?a=run/train/g0000003/0001&b=run/train/g0000003/0000")
    page.go_back()
    page.click("a[rel=next]")
    page.wait_for_selector("#item-12")
    assert page.locator("#item-9").count() == 0
    page.goto(f"{viewed}/run/search")
    page.click("text=Prompts")
    page.click(f"text={filled.CANDIDATES[1]}")
    page.wait_for_url("**/prompt/**")
    assert page.locator(".card del").first.inner_text() == "brief."
    assert page.locator(".card ins").first.inner_text().startswith("polite.")
    page.click("text=search/prompts/heldout")
    page.click('td a:text-is("0000")')
    page.click("text=prompt 3")
    page.wait_for_url("**/prompt/**")


def test_what_agents_wrote_stays_text_and_fits_on_a_phone(viewed: str, new_page: NewPage) -> None:
    page = new_page()
    page.set_viewport_size(PHONE)
    covering = """[...document.querySelectorAll('main *')].filter(e => e.checkVisibility()
        && getComputedStyle(e).position === 'fixed').length"""
    for path in PAGES[:-1]:
        page.goto(viewed + path)
        page.wait_for_timeout(50)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{path} is {wide} px wider than the phone"
        assert page.evaluate(covering) == 0, path
        assert page.title() != "owned"
        assert page.locator("main img, main script:not([type])").count() == 0
    page.goto(f"{viewed}/rollout/{ROLLOUT}")
    assert filled.HOSTILE in page.locator(".msg.user").first.inner_text()


def test_the_keyboard_alone_reaches_a_token(viewed: str, new_page: NewPage) -> None:
    page = new_page()
    page.goto(f"{viewed}/rollout/{ROLLOUT}")
    page.wait_for_selector(".tokens span")
    page.keyboard.press("j")
    page.wait_for_url("**/0001")
    page.keyboard.press("k")
    page.wait_for_url("**/0000")
    page.wait_for_selector(".tokens span")
    page.keyboard.press("n")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("location.hash") == "#call-1.1"
    page.keyboard.press("c")
    assert page.evaluate("document.querySelector('#paint :checked').value") == "advantage"
    page.keyboard.press("Escape")
    assert page.locator(".tokens .on").count() == 0
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    page.goto(f"{viewed}/rollout/{ROLLOUT}#call-2.5")
    page.wait_for_selector("[data-call='2'] span:nth-child(6).on")
    page.keyboard.press("/")
    page.wait_for_url("**/find/run")


def test_every_page_is_useful_without_javascript(viewed: str, new_page: NewPage) -> None:
    page = new_page(java_script_enabled=False)
    page.goto(f"{viewed}/run/run")
    assert page.locator(".chart svg path").count() >= 3
    page.click('a[title="run/train/g0000003"]')
    page.click('td a:text-is("0000")')
    assert page.locator(".tokens").first.inner_text()
    page.click("text=Every token's numbers >> nth=0")
    assert "0.555556" in page.locator("#t5").inner_text()


def test_a_phone_shows_a_token_and_covers_nothing(viewed: str, new_page: NewPage) -> None:
    page = new_page()
    page.set_viewport_size(PHONE)
    page.goto(f"{viewed}/rollout/{ROLLOUT}")
    page.wait_for_selector(".tokens span")
    page.click("[data-call='0'] span:nth-child(6)")  # the sheet of a token comes, and goes
    assert page.locator("#inspector").is_visible()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    *_, last, sheet = boxes(page, ".talk details, #inspector")
    assert last["y"] + last["height"] <= sheet["y"]
    page.click("#inspector button")
    assert not page.locator("#inspector").is_visible()


def test_the_keyboard_alone_compares_runs(viewed: str, new_page: NewPage) -> None:
    """Every stop is visible, below the bar, and has an outline."""
    page = new_page()
    page.goto(f"{viewed}/?sort=run&order=up")
    ticked, seen = 0, []
    while not seen or not seen[-1].startswith("Compare the"):
        page.keyboard.press("Tab")
        name, outline, top = page.evaluate(
            """(() => { const e = document.activeElement, box = e.getBoundingClientRect();
            return [e.getAttribute('aria-label') || e.textContent || e.name,
                    getComputedStyle(e).outlineStyle, box.top]; })()"""
        )
        assert outline != "none", name
        assert top >= 0, name
        seen.append(name)
        if name in ("Compare run", "Compare other"):
            page.keyboard.press("Space")
            ticked += 1
    assert ticked == 2
    assert {"before", "after", "run", "empty", "other", "search"} <= set(seen)
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs?run=other&run=run")
    assert "algorithm.lr" in page.locator("main").inner_text()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing(viewed: str, new_page: NewPage, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    # Without transitions: colours are those of the scheme as soon as it changes.
    page = new_page(color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    found = {}
    for path in PAGES[:-1]:
        page.goto(viewed + path)
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        page.wait_for_timeout(150)
        options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
        broken = axe.Axe().run(page, options=options).response["violations"]
        page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
        contrast = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
        broken += axe.Axe().run(page, options=contrast).response["violations"]
        page.emulate_media(color_scheme=scheme)
        found |= {f"{path} {one['id']}": one["nodes"][0]["html"][:200] for one in broken}
    assert not found


def test_an_export_opens_from_disk_without_a_request(
    filled_store: str, tmp_path: Path, new_page: NewPage
) -> None:
    async def write(name: str, **options: str) -> str:
        async with open_store(filled_store, readonly=True) as store:
            return await export(store, "run", tmp_path / name, **options)

    assert finish(write("all.html")).startswith("25 of 25")
    assert finish(write("few.html", rollouts="sample:2")).startswith("2 of 25")
    assert finish(write("bad.html", rollouts="failures")).startswith("5 of 25")
    page, asked = new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{tmp_path / 'all.html'}")
    page.wait_for_selector(".u-over")
    page.click('a[title="run/train/g0000003"]')
    page.click('td a:text-is("0000")')
    page.wait_for_selector(".tokens span")
    assert filled.HOSTILE in page.locator(".msg.user").first.inner_text()
    page.hover(".tokens span:nth-child(6)")
    assert "0.555556" in page.locator("#inspector").inner_text()
    page.click(".outline a >> nth=2")
    page.go_back()
    page.wait_for_selector("text=Task")
    page.goto(f"file://{tmp_path / 'all.html'}#/data/likes")
    page.wait_for_selector("text=The first 10 items")
    assert page.title() != "owned"
    assert set(asked) == {f"file://{tmp_path / 'all.html'}"}


def test_an_exported_search_has_its_prompts(
    filled_store: str, tmp_path: Path, new_page: NewPage
) -> None:
    async def write() -> str:
        async with open_store(filled_store, readonly=True) as store:
            return await export(store, "search", tmp_path / "x.html", redact="polite|onerror")

    assert finish(write()).startswith("11 of 11")
    page = new_page()
    page.goto(f"file://{tmp_path / 'x.html'}#/prompts/search")
    page.click(f"text={filled.CANDIDATES[1]}")
    page.wait_for_selector("text=Reflection")
    text = page.locator("main").text_content()
    assert re.search(r"Be █\d\.", text)
    assert "onerror" not in text
    page.click("text=search/prompts/heldout")
    page.click('td a:text-is("0000")')
    page.wait_for_selector("text=too short")
    assert "onerror" not in page.locator("main").text_content()


def test_a_redacted_export_has_no_match(
    filled_store: str, tmp_path: Path, new_page: NewPage
) -> None:
    file = tmp_path / "new" / "hidden.html"

    async def write() -> None:
        async with open_store(filled_store, readonly=True) as store:
            trace = await store.trace(ROLLOUT)
            assert trace is not None
            await export(store, "run", file, redact="question|boom|line 2|onerror")

    finish(write())
    page = new_page()
    for id in ("0000", "0001", "0003"):
        page.goto(f"file://{file}#/rollout/run/train/g0000003/{id}")
        page.wait_for_selector(".rollout")
        text = page.locator("main").text_content()
        assert "█" in text
        assert not re.search("question|boom|line 2|onerror", text)


@pytest.mark.skipif("AGENTRL_SCREENSHOTS" not in os.environ, reason="AGENTRL_SCREENSHOTS unset")
def test_screenshots_of_the_readme(new_page: NewPage) -> None:
    folder = Path(os.environ["AGENTRL_SCREENSHOTS"])
    process, address = start(os.environ.get("AGENTRL_SCREENSHOTS_OF", "runs/staff/store.db"))
    paths = {"run": "run/staff", "rollout": "rollout/staff/train/g0000007/0003#call-0.18"}
    for scheme in ("light", "dark"):
        page = new_page(color_scheme=scheme)
        for name, path in paths.items():
            page.goto(address + path)
            page.wait_for_timeout(1000)
            page.screenshot(path=folder / f"view-{name}-{scheme}.png")
    stop(process)


async def fail_all(folder: Path) -> str:
    """A run that its first evaluation ended: the URL of its store."""
    url, group = f"sqlite:///{folder / 'store.db'}", "run/eval/000000/score"
    async with open_store(url) as store:
        await store.open_run("run", filled.config(folder, None))
        new = [
            NewRollout(
                id=f"{group}/{i:04}", run="run", group=group, index=i, task={}, purpose=Purpose.EVAL
            )
            for i in range(MANY)
        ]
        await store.enqueue(new)
        attempts = await store.claim(MANY, runner="w", run="run", lease=9.0, timeout=1.0)
        failure = Failure(kind=ErrorKind.NO_CALL, message=f"no call {'_' * 300}, and so on")
        await store.finish([
            Outcome(attempt=one.id, fence=one.fence, failure=failure) for one in attempts
        ])  # fmt: skip
    return url


def test_a_run_that_never_began_says_why_and_fits(tmp_path: Path, new_page: NewPage) -> None:
    process, address = start(finish(fail_all(tmp_path)))
    page = new_page()
    page.set_viewport_size(PHONE)
    page.goto(f"{address}run/run")
    says = page.inner_text(".says")
    assert "No step is trained yet; the most likely reasons" in says
    assert "the agent makes no call at the gateway in 100% of the rollouts" in says
    assert page.locator("text=All 0 metrics").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    (bars,) = boxes(page, "svg.bars")
    assert bars["right"] <= PHONE["width"]
    stop(process)
