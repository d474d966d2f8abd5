"""Images in the pages of `agentrl view`, in exported files and in notebooks."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import agentrl
from agentrl import transcript
from agentrl.store import open_store
from agentrl.view.export import export
from agentrl.view.pages import Pages
from tests.agentrl.view import looking
from tests.agentrl.view.filled import finish, start, stop
from tests.agentrl.view.looking import GONE, LABEL, PHOTO, ROLLOUT, SCREEN, TALL, TINY, VECTOR

SHOWN = [TINY, SCREEN, PHOTO, TALL]
IMAGE = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
PRUNED = "no longer stored: a prune has removed it"
PAGES = [f"/rollout/{ROLLOUT}", "/run/look", "/data/looks", "/find/look"]
SCHEMES = ["light", pytest.param("dark", marks=pytest.mark.slow)]
NewPage = Callable[..., Any]


@pytest.fixture(scope="module")
def look_store(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> str:
    folder = tmp_path_factory.mktemp("look")
    url = f"sqlite:///{folder / 'store.db'}"
    finish(looking.fill(url, folder, tiny_model_dir))
    return url


@pytest.fixture(scope="module")
def looked(look_store: str) -> Iterator[str]:
    process, address = start(look_store)
    yield address.rstrip("/")
    stop(process)


@pytest.fixture
def client(looked: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=looked) as client:
        yield client


def test_images_are_in_the_conversation_at_their_place(client: httpx.Client) -> None:
    page = html.unescape(client.get(f"/rollout/{ROLLOUT}").text)
    addresses = [f'src="/image/{image.digest}?run=look"' for image in SHOWN]
    words = ["Look closely at this:", addresses[0], "before </script>", addresses[1], "after it",
             "I open it.", addresses[2], addresses[3], "[image 10x10 svg+xml", PRUNED,
             "[image, not stored: https://x.example/a.png]"]  # fmt: skip
    places = [page.index(word) for word in words]
    assert places == sorted(places)
    assert len(re.findall("<img", page)) == len(SHOWN) + 1  # of the text: the agent's own
    assert f'alt="{LABEL}"' in page
    assert len(re.findall('width="112" height="112" decoding="async" class="small">', page)) == 1
    for image in SHOWN:
        answer = client.get(f"/image/{image.digest}?run=look")
        assert (answer.content, answer.headers["content-type"]) == (image.body, image.media_type)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers.get_list("cache-control") == ["private, max-age=3600, immutable"]
        assert answer.headers.get_list("content-security-policy") == [IMAGE]
    (policy,) = client.get(f"/rollout/{ROLLOUT}").headers.get_list("content-security-policy")
    assert "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';" in policy
    assert client.get("/").headers.get_list("cache-control") == ["no-store"]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        (f"/image/{GONE}?run=look", 404, "not stored: a prune has removed it"),
        (f"/image/{VECTOR.digest}?run=look", 404, "type image/svg+xml, which is not shown"),
        (f"/image/{SCREEN.digest}", 400, "lacks run="),
        ("/image/none?run=look", 400, "64 hexadecimal digits"),
    ],
)
def test_what_is_no_image_is_a_sentence(
    client: httpx.Client, path: str, status: int, sentence: str
) -> None:
    answer = client.get(path)
    assert (answer.status_code, sentence in answer.text) == (status, True), answer.text
    assert "<script>document" not in answer.text


def test_prompts_and_searches_know_images(client: httpx.Client) -> None:
    prompt = client.get(f"/raw/{ROLLOUT}?what=prompt&call=0").text
    sizes = [4, 5, 6, 7, 8]
    shown = [TINY, *SHOWN[1:], VECTOR]
    assert [int(n) for n in re.findall(r", (\d+) tokens\]", prompt)] == sizes
    assert f"{LABEL[:-1]}, 5 tokens]" in prompt
    assert prompt.count("[image ") == len(shown)
    found = client.get("/find/look?images=1").text
    assert ROLLOUT in found
    assert "/0000/0002" not in found
    assert "look/train/g0000000/0002" in client.get("/find/look").text
    assert 'value="1" checked> has images' in found


def test_images_of_a_data_set_and_of_one_of_several_stores(
    client: httpx.Client, look_store: str, filled_store: str
) -> None:
    page = client.get("/data/looks").text
    assert page.count("<img src=") == len(SHOWN)  # of the common prompt
    process, address = start(look_store, filled_store)
    with httpx.Client(base_url=address) as several:
        link = several.get("/run/look").headers["location"]
        own = link.removesuffix("/run/look")
        page = several.get(f"{own}/rollout/{ROLLOUT}").text
        source = re.search(rf'src="({own}/image/{SCREEN.digest}[^"]+)"', page)
        assert source
        assert several.get(html.unescape(source[1])).content == SCREEN.body
    stop(process)


async def test_what_images_are_is_read_once(look_store: str) -> None:
    asked: list[str] = []
    async with open_store(look_store, readonly=True) as store:
        read = store.images

        async def images(run: str, digests: Any) -> Any:
            asked.extend(digests)
            return await read(run, digests)

        store.images = images  # type: ignore[method-assign]
        pages = Pages(store)
        for _ in range(2):
            await pages.rollout(ROLLOUT)
            await pages.run("look", {})
    assert sorted(asked) == sorted(image.digest for image in (*SHOWN, VECTOR))


async def test_the_console_says_what_was_seen(
    look_store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await transcript.show_rollout(look_store, ROLLOUT)
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"{LABEL} after it" in said
    assert "Look closely at this: [image 14x14 png " in said
    assert PRUNED in said
    await transcript.show_rollout(look_store, ROLLOUT, prompts=True)
    assert f"{LABEL[:-1]}, 5 tokens]" in capsys.readouterr().out


def test_an_export_has_its_images_up_to_a_limit(
    look_store: str, tmp_path: Path, new_page: NewPage
) -> None:
    async def write(name: str, **options: Any) -> str:
        async with open_store(look_store, readonly=True) as store:
            return await export(store, "look", tmp_path / name, **options)

    assert "3 of 3 rollouts, 4 of 4 images in" in finish(write("all.html"))
    limit = len(SCREEN.body) + len(PHOTO.body)
    few = finish(write("few.html", image_bytes=limit))
    assert f"2 of 4 images (the images of this file are limited to {limit:,} bytes)" in few
    hidden = finish(write("hidden.html", redact="shop"))
    assert "0 of 4 images (--redact cannot read images, so all are left out)" in hidden
    assert "data:image" not in (tmp_path / "hidden.html").read_text().partition("<body")[2].replace(
        "data:image/png;base64,...", ""
    )
    page, asked = new_page(), []
    page.on("request", lambda request: asked.append(request.url[:5]))
    for name, known in (("all", SHOWN), ("few", [SCREEN, PHOTO]), ("hidden", [])):
        page.goto(f"file://{tmp_path / name}.html#/rollout/{ROLLOUT}")
        page.reload()
        page.wait_for_selector(".rollout")
        page.wait_for_timeout(0)
        sizes = page.eval_on_selector_all(
            ".shot img", "all => Promise.all(all.map(i => i.decode().then(() => i.naturalWidth)))"
        )
        assert sizes == [image.width for image in known]
        missing = page.locator(".parts .cut").all_inner_texts()
        assert sum("not in this file" in one for one in missing) == 4 - len(known)
    assert set(asked) <= {"file:", "data:"}


def test_a_notebook_has_its_images_inside(look_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = agentrl.show(ROLLOUT, store=look_store).html
    assert document.count('<img src="data:image/') == len(SHOWN)
    assert "/image/" not in document
    from agentrl.view import export

    monkeypatch.setattr(export, "MAX_IMAGE_BYTES", len(TINY.body))
    document = agentrl.show(ROLLOUT, store=look_store).html
    assert document.count('<img src="data:image/') == 1
    assert f"{LABEL}, too large for a notebook" in document


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_image_is_seen_in_full_by_keyboard_and_by_phone(
    looked: str, new_page: NewPage, scheme: str
) -> None:
    page = new_page(color_scheme=scheme)
    page.goto(f"{looked}/rollout/{ROLLOUT}")
    shot = page.locator(f'.shot[href*="{SCREEN.digest}"]')
    shot.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog.picture[open]")
    assert dialog.get_attribute("aria-label") == LABEL
    assert page.evaluate("document.querySelector('.picture img').decode().then(() => true)")
    assert page.evaluate("document.querySelector('.picture img').naturalWidth") == SCREEN.width
    assert page.evaluate("document.activeElement.textContent") == "Close"
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.picture", state="detached")
    assert page.evaluate("document.activeElement.className") == "shot"
    page.set_viewport_size({"width": 390, "height": 844})
    for path in PAGES:
        page.goto(looked + path)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, path
    page.goto(f"{looked}/rollout/{ROLLOUT}")
    shot.click()
    wide = "document.querySelector('.picture img').getBoundingClientRect().width"
    assert page.evaluate(wide) <= 390
    page.click("text=Actual size")
    assert page.evaluate(wide) == SCREEN.width
    page.keyboard.press("Escape")
    page.click(f'.shot[href*="{TINY.digest}"]')  # which is shown larger than it is
    assert not page.locator("text=Actual size").is_visible()
    assert page.title() != "owned"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_beside_images(looked: str, new_page: NewPage, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page, found = new_page(color_scheme=scheme, bypass_csp=True), {}
    options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    for path in (*PAGES, "dialog"):
        if path == "dialog":
            page.goto(f"{looked}/rollout/{ROLLOUT}")
            page.click(f'.shot[href*="{SCREEN.digest}"]')
        else:
            page.goto(looked + path)
        broken = axe.Axe().run(page, options=options).response["violations"]
        found |= {f"{path} {one['id']}": one["nodes"][0]["html"][:200] for one in broken}
    assert not found


def test_without_a_script_its_link_opens_an_image(looked: str, new_page: NewPage) -> None:
    page = new_page(java_script_enabled=False)
    page.goto(f"{looked}/rollout/{ROLLOUT}")
    page.click(f'.shot[href*="{SCREEN.digest}"]')
    page.wait_for_url(f"**/image/{SCREEN.digest}?run=look")
