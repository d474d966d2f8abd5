"""A rollout of many calls: each page has some of them, and links to the others."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.cli.mcp_server import PAGE, Runs, Tools
from agentrl.core.errors import Invalid
from agentrl.core.types import NewRollout, Reward, Scope, Transition
from agentrl.store import open_store
from agentrl.transcript import show_rollout
from agentrl.view import export as notebook
from agentrl.view import front, records
from agentrl.view.export import export
from agentrl.view.records import CALLS_PER_PAGE, Conversations, Paging
from tests import factories
from tests.agentrl.view import filled
from tests.agentrl.view.filled import finish, start, stop

CALLS = 2 * CALLS_PER_PAGE + 30
LONG = "run/long/0"


async def add_long(url: str, calls: int = CALLS) -> None:
    """A planner's conversation, in which each third call is one of a critic's own."""
    async with open_store(url) as store:
        new = NewRollout(id=LONG, run="run", group="run/long", index=0, task={}, priority=9)
        await store.enqueue([new])
        (attempt,) = await store.claim(1, runner="test", lease=600.0, run="run", timeout=5.0)
        chat: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        made = list[Transition]()
        for at in range(calls):
            critic = at % 3 == 2
            said = [{"role": "user", "content": f"judge {at}"}] if critic else chat
            call = filled.call(attempt, at, said, role="critic" if critic else "planner")
            made.append(call)
            if not critic:
                chat = [*chat, call.answer or {}, {"role": "tool", "content": f"row {at}"}]
        await store.add_transitions(made)
        reward = Reward(value=0.5, name="turn", scope=Scope.TRANSITION, target=made[77].id)
        await store.finish([filled.Outcome(attempt.id, attempt.fence, rewards=[reward])])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("long")
    url = f"sqlite:///{folder / 'store.db'}"
    finish(filled.fill(url, folder, None, steps=1))
    finish(add_long(url))
    return url


@pytest.fixture(scope="module")
def client(store: str) -> Iterator[httpx.Client]:
    process, address = start(store)
    with httpx.Client(base_url=address) as client:
        yield client
    stop(process)


def shown(page: str) -> list[int]:
    return [int(at) for at in re.findall(r'<section class="call[^"]*" id="call-(\d+)"', page)]


def links(page: str) -> set[int]:
    nav = "".join(re.findall(r'<nav class="pager".*?</nav>', page, re.DOTALL))
    return {int(at) for at in re.findall(r"[?;]call=(\d+)", nav)}


def test_a_page_has_some_calls_and_leads_to_all(client: httpx.Client) -> None:
    seen = list[int]()
    for first in range(0, CALLS, CALLS_PER_PAGE):
        page = client.get(f"/rollout/{LONG}?call={first}").text
        seen += shown(page)
        assert f"{CALLS} calls" in page
        assert links(page) >= set(range(CALLS_PER_PAGE, CALLS, CALLS_PER_PAGE)) - {first}
    assert seen == list(range(CALLS))
    assert shown(client.get(f"/rollout/{LONG}").text) == list(range(CALLS_PER_PAGE))
    for at in (77, 99, CALLS - 1):  # a deep link
        assert at in shown(client.get(f"/rollout/{LONG}?call={at}").text)
    assert shown(client.get(f"/rollout/{LONG}?call=99999").text)[-1] == CALLS - 1


def test_a_later_page_says_what_is_new_and_what_is_continued(client: httpx.Client) -> None:
    page = client.get(f"/rollout/{LONG}?call={CALLS_PER_PAGE}").text
    assert page.count("row 49<") == 1  # of the planner's call before this page
    assert "row 48<" not in page
    assert "turn <b>0.5" in page
    assert f'href="/rollout/{LONG}?call=49#call-49"' in html.unescape(page)  # continued call
    assert '"go"' in client.get(f"/raw/{LONG}?call=100&message=0").text
    assert client.get(f"/tokens/{LONG}?call=0&call=120").json().keys() == {"0", "120"}
    assert f"Tokens of call {CALLS - 1}" in client.get(f"/call/{CALLS - 1}/{LONG}").text
    assert client.get(f"/call/{CALLS}/{LONG}").status_code == 404


def test_other_pages_are_paged_too(client: httpx.Client) -> None:
    compared = f"/compare?a={LONG}&b=run/train/g0000000/0000"
    first, last = client.get(compared).text, client.get(f"{compared}&call=120").text
    assert len(re.findall(r"no such call", first)) == CALLS_PER_PAGE - 3
    assert "The first difference is in call" in last
    assert links(last) >= {CALLS_PER_PAGE}
    lanes = client.get(f"/lanes/{LONG}").text
    assert lanes.count("<rect") == CALLS
    attempts = client.get(f"/attempts/{LONG}").text
    assert f"{CALLS} calls" in attempts


def test_an_explanation_is_paged(store: str) -> None:
    calls = [factories.call(id=f"c{at}") for at in range(CALLS)]
    text = "\n".join(f"call {call.id}, agent, 3 tokens\n  note" for call in calls)
    page = front.read(text, calls, 77)
    assert [call["at"] for call in page["calls"]] == list(range(50, 100))
    assert page["paging"] == Paging(50, 100, CALLS)


def write(store: str, file: Path) -> None:
    async def export_run() -> None:
        async with open_store(store, readonly=True) as opened:
            await export(opened, "run", file)

    finish(export_run())


def test_an_exported_rollout_has_all_its_pages(store: str, tmp_path: Path) -> None:
    write(store, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    pages = dict[str, str]()
    for chunk in re.findall(r'id="chunk-\d+">([^<]+)<', text):
        pages |= json.loads(gzip.decompress(base64.b64decode(chunk)))
    found = [shown(pages[f"/rollout/{LONG}{query}"]) for query in ("", "?call=50", "?call=100")]
    assert [at for page in found for at in page] == list(range(CALLS))
    assert 'class="values"' in pages[f"/rollout/{LONG}?call=100"]
    assert f'data-calls="{CALLS_PER_PAGE}"' in text


def test_a_link_to_a_call_opens_the_page_that_has_it(
    client: httpx.Client, store: str, tmp_path: Path, new_page: Any
) -> None:
    write(store, tmp_path / "run.html")
    served, file = f"{client.base_url}rollout/{LONG}", f"file://{tmp_path / 'run.html'}"
    page, found = new_page(), list[int]()
    links = f"{served}#call-120", f"{served}#call-77.3", f"{file}#/rollout/{LONG}#call-120"
    for address in links:
        page.goto("about:blank")
        page.goto(address)
        page.wait_for_selector(f"#call-{120 if '120' in address else 77}")
        found.append(page.locator(".call").count())
    assert found == [30, 50, 30]
    page.click("text=previous >> nth=0")
    page.wait_for_selector("#call-77")


def test_a_notebook_shows_the_page_of_a_call(store: str) -> None:
    assert shown(notebook.show(LONG, store=store, call=120).html) == list(range(100, CALLS))


def answers(text: str) -> list[int]:
    """The calls whose answers a text has."""
    return [int(at) for at in re.findall(rf"answer (\d+) of {LONG}\s+\[", text)]


def test_a_console_prints_a_page_and_how_to_go_on(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[int]()
    for first in range(0, CALLS, CALLS_PER_PAGE):
        finish(show_rollout(store, LONG, first=first))
        text = capsys.readouterr().out
        assert len(text.splitlines()) < 4 * CALLS_PER_PAGE
        assert text.count("row 49") == (first == CALLS_PER_PAGE)  # said once
        seen += answers(text)
    assert seen == list(range(CALLS))
    assert f"Calls 100 to 129 of {CALLS}, --full all." in text
    finish(show_rollout(store, LONG))
    assert f"of {CALLS}; --call 50 prints the next, --full all." in capsys.readouterr().out
    finish(show_rollout(store, LONG, whole=True))
    text = capsys.readouterr().out
    assert answers(text) == list(range(CALLS))
    assert "--call" not in text
    finish(show_rollout(store, LONG, prompts=True, first=120))
    assert "call 120, " in capsys.readouterr().out
    for wrong in (CALLS, -1):
        with pytest.raises(Invalid, match=f"there is no call {wrong}"):
            finish(show_rollout(store, LONG, first=wrong))


def test_a_coding_agent_reads_it_page_by_page(store: str, tmp_path: Path) -> None:
    tools, seen, cursor = Tools(Runs(tmp_path, store), False), list[int](), ""
    for _ in range(40):
        text = finish(tools.show_rollout(LONG, cursor))
        assert len(text) < 1.1 * PAGE
        seen += answers(text)
        if not (more := re.search(r'cursor="([^"]+)"\]$', text)):
            break
        cursor = more[1]
    assert seen == list(range(CALLS))
    for wrong in ("7", "x/1", "999/"):
        with pytest.raises(Invalid):
            finish(tools.show_rollout(LONG, wrong))


@pytest.mark.parametrize("shape", ["chat", "fresh", "alike", "forks"])
def test_conversations_are_found_in_linear_work(shape: str) -> None:
    """Counted, not timed: messages that are looked at one by one."""
    work = []
    for n in (200, 800):
        chat, calls = [{"role": "user", "content": "go"}], list[Transition]()
        for at in range(n):
            new = {"role": "user", "content": f"{at}"}
            said = {"chat": chat, "fresh": [new], "alike": [chat[0], new]}
            calls.append(factories.call(messages=said.get(shape, [*chat[:3], new])))
            chat = [*chat, {"role": "assistant", "content": f"{at}"}, new]
        found = Conversations()
        parents = [found.add(at, call)[0] for at, call in enumerate(calls)]
        assert (parents[-1] == n - 2) is (shape == "chat")
        work.append(found.compared)
    assert work[1] <= 4.5 * work[0]


def test_the_answer_is_shown_once_if_the_agent_changes_its_form() -> None:
    go, answer = {"role": "user", "content": "go"}, {"role": "assistant", "content": "a"}
    other = {"role": "assistant", "content": [{"type": "text", "text": "a"}]}
    more = {"role": "user", "content": "more"}
    first = factories.call(messages=[go], answer=answer)
    for said, known in (([go, answer, more], 2), ([go, other, more], 2), ([go, more], 1)):
        found = Conversations()
        found.add(0, first)
        assert found.add(1, factories.call(messages=said)) == (0, known)
    assert records.talk([first, factories.call(messages=[go, other, more])])[2]["text"] == "more"
