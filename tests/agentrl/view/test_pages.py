"""The server of `agentrl view`, asked over HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import html
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import click
import httpx
import pytest

import agentrl
from agentrl.cli import inspect as view_command
from agentrl.cli.main import cli
from agentrl.core.access import ANYBODY
from agentrl.core.errors import ConfigError
from agentrl.core.types import (
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    PolicyVersion,
    Purpose,
    Reward,
    Scope,
    Span,
    StepCommit,
)
from agentrl.store import open_store
from agentrl.view import front, records, server, summaries
from agentrl.view.export import export
from agentrl.view.pages import Page, Pages
from agentrl.view.server import Home
from agentrl.view.templates import STATIC, clipped, environment, render
from tests import factories
from tests.agentrl.view import filled
from tests.agentrl.view.filled import start, stop

ROLLOUT = "run/train/g0000003/0000"
PATHS = [
    "/", "/runs?run=run&run=other", "/run/run", "/run/run?live=1", "/run/empty", "/step/3/run",
    "/groups/run", "/groups/run?step=3&purpose=train", "/groups/empty",
    "/group/run/train/g0000003?run=run", "/group/run/queued?run=run", f"/rollout/{ROLLOUT}",
    "/rollout/run/train/g0000003/0003", f"/attempts/{ROLLOUT}", f"/lanes/{ROLLOUT}",
    f"/call/1/{ROLLOUT}", f"/compare?a={ROLLOUT}&b=run/train/g0000003/0001",
    "/find/run", "/find/run?reward=style&low=0.2&state=succeeded&role=critic&from=1&to=4",
    "/tasks/run", "/tasks/run?of=train&sort=trend", "/tasks/search", "/tasks/empty",
    "/?sort=gain&order=up&q=run", "/policies/run", f"/tokens/{ROLLOUT}?call=0&call=2",
    "/series/run?name=reward/mean&after=2",
    f"/raw/{ROLLOUT}?what=result", "/data/likes", "/data/likes?version=1",
    "/data/likes?split=test", "/data/likes?after=9", "/prompts/search", "/prompts/run",
    f"/prompt/{filled.CANDIDATES[1]}?run=search",
]  # fmt: skip


@pytest.fixture(scope="module")
def client(viewed: str):
    with httpx.Client(base_url=viewed) as client:
        yield client


def test_every_page_answers_and_nothing_is_written(filled_store: str, client: httpx.Client) -> None:
    file = Path(filled_store.removeprefix("sqlite:///"))
    before = hashlib.sha256(file.read_bytes()).digest()
    for path in PATHS:
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        assert "script-src 'self'" in answer.headers["content-security-policy"], path
        if not answer.headers["content-type"].startswith("text/plain"):
            assert "<img" not in answer.text, path
            assert "<b>bold" not in answer.text, path
    assert hashlib.sha256(file.read_bytes()).digest() == before


async def test_the_page_of_a_call_has_the_numbers_of_the_store(filled_store: str) -> None:
    async with open_store(filled_store, readonly=True) as store:
        trace, credits = await store.trace(ROLLOUT), await store.credits(ROLLOUT)
        table = render(await Pages(store).numbers(ROLLOUT, 0))
    assert trace is not None
    assert f"{credits[0].psi[5]:.6g}" in table
    assert f"{trace.transitions[0].logprobs[4]:.6g}" in table


def test_a_token_is_shown_as_it_was_written() -> None:
    nothing: dict[str, Any] = {name: [] for name in ("logp", "advantage", "psi", "weight", "gate")}
    tokens = nothing | {"ids": [1, 2], "text": ["<tool_call>", "\n"], "baseline": []}
    values = {"id": "r", "at": 0, "tokens": tokens, "call": factories.call()}
    page = render(Page("numbers.html", "r call 0", values))
    assert [html.unescape(x) for x in re.findall(r"<td>(.*?)</td>", page)] == [
        '"<tool_call>"', '"\\n"'
    ]  # fmt: skip


def test_the_prompt_of_a_call_is_shown_as_the_policy_read_it(client: httpx.Client) -> None:
    path = f"/raw/{ROLLOUT}?what=prompt&call=1"
    assert path in html.unescape(client.get(f"/rollout/{ROLLOUT}").text)
    assert client.get(path).text == '<|im_start|><|im_end|>!"#'
    assert client.get(f"/raw/{ROLLOUT}?what=prompt&call=77").status_code == 404


def test_missing_is_not_zero(client: httpx.Client) -> None:
    failed = client.get("/rollout/run/train/g0000003/0003").text
    assert "no reward" in failed
    assert "line 2" in failed
    queued = client.get("/group/run/queued?run=run").text
    assert '<td class="n" data-l="seconds">0.00</td>' in queued
    assert "first 2,000 of 20,000 characters" in client.get("/rollout/run/train/g0000003/0001").text


def test_what_functions_of_the_user_measured_is_among_the_curves(client: httpx.Client) -> None:
    assert 'data-name="eval/function/depth"' in client.get("/run/run").text


def test_items_of_a_data_set(client: httpx.Client) -> None:
    first, *_ = client.get("/data/likes").text.partition('id="item-1"')
    assert first.count("Answer shortly.") == 1  # the prompt of both sides
    assert re.findall(r"<h3>(\w+)</h3>", first) == ["chosen", "rejected"]
    assert first.index("answer 0 of run/train/g0000003/0001") < first.index("<h3>rejected")
    assert "margin 0.75" in first
    assert "style <b>0.5</b> <small>judge" in first
    labelled = client.get("/data/likes").text.partition('id="item-1"')[2]
    labelled = labelled.partition('id="item-2"')[0]
    assert re.findall(r"label of this call: <b>(\S+)</b>", labelled) == ["0.25", "1"]
    only = client.get("/data/likes?split=test").text
    assert re.findall(r'id="item-(\d+)"', only) == ["2"]
    assert "label 0<" in only


def test_scores_and_texts_of_candidates(client: httpx.Client) -> None:
    rows = client.get("/prompts/search").text.split("<tr>")[2:]
    numbers = [re.findall(r'class="n[^"]*">([\d.–]+)<', row)[:3] for row in rows]  # noqa: RUF001
    assert numbers == [["0.25", "0", "–"], ["0.75", "–", "0.5"]]  # noqa: RUF001
    assert "where a search began" in rows[0]
    assert "solver" in rows[1].partition("where a search")[0]
    page = client.get(f"/prompt/{filled.CANDIDATES[1]}?run=search").text
    assert "Answer. Be <del>brief.</del><ins>polite." in page
    assert "Why? &lt;/script&gt;" in page


async def test_runs_and_rollouts_lead_to_candidates(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    await filled.fill_search(url, tmp_path)
    async with open_store(url, readonly=True) as store:
        pages, rollout = Pages(store), f"search/prompts/heldout/{filled.CANDIDATES[1]}/0000"
        assert 'href="/prompts/search"' in render(await pages.run("search", {}))
        read = render(await pages.rollout(rollout))
        assert re.search(rf'href="/prompt/[^"]+">prompt {filled.CANDIDATES[1]}<', read)


def test_rollouts_are_compared_by_words(client: httpx.Client) -> None:
    """An id says less than the task; where both have the same, less than where they are."""
    first, second, other = ROLLOUT, "run/train/g0000003/0001", "run/train/g0000002/0000"
    same = client.get(f"/compare?a={first}&b={second}").text
    assert "<h1>task 3</h1>" in same
    assert ">training, step 4, rollout 0001</a></h2>" in same
    two = client.get(f"/compare?a={first}&b={other}").text
    assert "<h1>Two tasks</h1>" in two
    assert ">task 3</a></h2>" in two
    assert ">task 2</a></h2>" in two


def test_the_whole_message_has_its_own_address(client: httpx.Client) -> None:
    page = client.get("/rollout/run/train/g0000003/0001").text
    link = re.search(r'href="(/raw/[^"]+message=[^"]+)"', page)
    assert link
    answer = client.get(link[1].replace("&amp;", "&"))
    assert filled.LONG in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/run/none", 404, "no run"),
        ("/rollout/none", 404, "no rollout"),
        ("/rollout/run/queued/0", 404, "may be queued"),
        ("/group/none?run=run", 404, "prune"),
        ("/group/none", 400, "lacks run="),
        ("/step/99/run", 404, "no step"),
        ("/data/none", 404, "no version"),
        ("/data/likes?version=7", 404, "no version 7"),
        ("/data/likes?after=x", 400, "after must be a whole number"),
        ("/prompt/none?run=search", 404, "no candidate"),
        ("/prompt/none", 400, "lacks run="),
        ("/find/run?low=much", 400, "low must be a number"),
        ("/find/run?state=odd", 400, "must be one of"),
        ("/runs?run=run", 400, "two to four"),
        (f"/tokens/{ROLLOUT}?call=9", 404, "no call 9"),
        (f"/raw/{ROLLOUT}?call=0&message=77", 404, "no message"),
        ("/other", 404, "shows nothing"),
    ],
)
def test_what_cannot_be_shown_is_a_sentence(client, path: str, status: int, sentence: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, sentence in answer.text) == (status, True), answer.text
    assert "Traceback" not in answer.text


def test_strangers_are_refused(client: httpx.Client) -> None:
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.post("/").status_code == 405
    assert client.get("/").status_code == 200


def test_a_key_becomes_a_cookie(filled_store: str) -> None:
    process, address = start(filled_store, "--host", "0.0.0.0", AGENTRL_VIEW_KEY="secret-key")
    try:
        port = httpx.URL(address).port
        assert httpx.URL(address).params["key"] == "secret-key"
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.get("/").status_code == 401
            assert client.get("/?key=wrong-key").status_code == 401
            answer = client.get("/run/run?key=secret-key")
            assert (answer.status_code, answer.headers["location"]) == (307, "/run/run")
            cookie = answer.headers["set-cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=strict" in cookie
            assert client.get("/", headers={"host": "evil.example"}).status_code == 200
            assert client.get("/run/run").status_code == 200
    finally:
        stop(process)


@pytest.mark.parametrize("key", ["short", "clé-of-view", "two\nlines-of-it"])
def test_a_key_that_is_none_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_VIEW_KEY", key)
    with pytest.raises(ConfigError, match="at least 8 ASCII") as raised:
        server.run("nowhere.db", "127.0.0.1", 0)
    assert key not in str(raised.value)


def test_the_server_imports_no_torch(filled_store: str) -> None:
    code = (
        "import asyncio, sys\n"
        "import agentrl.view.server, agentrl.view.export, agentrl.view.export\n"
        "from agentrl.view.pages import Pages\n"
        "from agentrl.view.templates import render\n"
        "from agentrl.store import open_store\n"
        "async def main():\n"
        f"    async with open_store({filled_store!r}, readonly=True) as store:\n"
        f"        assert len(render(await Pages(store).rollout({ROLLOUT!r}))) > 1000\n"
        "asyncio.run(main())\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_a_stream_of_changes_ends_with_the_server(filled_store: str) -> None:
    process, address = start(filled_store)
    with httpx.stream("GET", f"{address}events", timeout=10) as stream:
        lines = stream.iter_lines()
        assert "event: hello" in [next(lines) for _ in range(3)]
        process.terminate()
        list(lines)
    stop(process)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing/store.db"], "store.db"),
        (["STORE", "--port", "TAKEN"], "cannot listen"),
        (["STORE", "--rollouts", "all", "--redact", "x"], "--export"),
        (["STORE", "--export", "x.html", "--run", "none"], "none"),
        (["STORE", "--export", "x.html", "--run", "run", "--redact", "("], "regular expression"),
        (["STORE", "--export", "x.html", "--run", "run", "--rollouts", "few"], "sample:N"),
        (["STORE", "--export", "x.html"], "choose one with --run"),
    ],
)
def test_a_wrong_command_is_a_sentence(
    filled_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = {"STORE": filled_store, "TAKEN": str(taken.getsockname()[1])}
        assert sentence in factories.refused("view", *(words.get(a, a) for a in arguments))


def test_the_command_is_listed() -> None:
    assert "view" in cli.list_commands(click.Context(cli))


@contextlib.asynccontextmanager
async def asked(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The server of a store, asked in this process."""
    home = Home([url])
    await home.search()
    transport: Any = httpx.ASGITransport(server.ViewApp(home, ANYBODY))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    await home.close()


async def test_a_run_that_goes_away_is_a_sentence(tmp_path: Path, tiny_model_dir: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    await filled.fill(url, tmp_path, tiny_model_dir, steps=2)
    async with asked(url) as client:
        assert (await client.get("/rollout/run/train/g0000000/0000")).status_code == 200
        async with open_store(url) as store:
            await store.prune(run="run", keep_last=1)
        gone = await client.get("/rollout/run/train/g0000000/0000")
        assert (gone.status_code, "prune" in gone.text) == (404, True)
        assert ">pruned<" in (await client.get("/groups/run")).text
        assert (await client.get("/run/run")).status_code == 200


async def test_without_a_tokenizer_ids_are_shown_and_why(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    await filled.fill(url, tmp_path, None, steps=1)
    async with asked(url) as client:
        page = (await client.get("/rollout/run/train/g0000000/0000")).text
    assert "Token ids, because the tokenizer of not/there is not on this machine" in page
    assert " ".join(map(str, filled.WORDS)) in page
    answer = "answer 0 of run/train/g0000000/0000"  # what is known comes first
    assert page.index(answer) < page.index("Token ids, because")


def test_vendored_files_are_those_that_are_listed() -> None:
    listed = dict(
        re.findall(r"\| `(\S+)` \| ([0-9a-f]{64}) \|", (STATIC / "VENDORED.md").read_text())
    )
    assert set(listed) == {"uPlot.iife.min.js", "uPlot.min.css"}
    for name, digest in listed.items():
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest


def test_ids_may_have_any_characters(client: httpx.Client) -> None:
    answer = client.get(f"/run/{quote('a b/ü?#', safe='')}")
    assert answer.status_code == 404
    assert "ü?#" in answer.text


def test_a_file_says_when_a_page_says_how_long_ago() -> None:
    template = environment().from_string("{{ at | ago }}")
    assert template.render(at=0.0, export=True) == "1970-01-01"
    assert template.render(at=0.0, export=False).endswith(" d ago")


async def test_the_first_screen_is_the_verdict(tmp_path: Path) -> None:
    """Before and after, the reasons, a success and a failure as text, settings on demand."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    await filled.fill(url, tmp_path, None)
    await filled.fill_evaluations(url)
    async with open_store(url, readonly=True) as store:
        page = await Pages(store).run("other", {})
        text = render(page)
        tasks = (await Pages(store).tasks("other", {})).values
        step = (await Pages(store).step("other", 4)).values
    good, bad = page.values["examples"]
    assert (good.title, good.where, good.outcome) == ("A success", "held-out, after step 4", 1.0)
    assert (bad.title, bad.where) == ("A failure", "held-out, before training, the same task")
    assert (good.task, bad.task) == ("Name town 0?", "Name town 0?")
    assert text.index("A success") < text.index("Training</h2>")
    assert [(row.text, row.outcomes) for row in tasks["task_rows"]] == [
        ("Name town 0?", [0.0, 1.0]), ("Name town 1?", [0.0, 1.0])
    ]  # fmt: skip
    assert [one["task"] for one in step["completions"]] == ["task 3"] * filled.SIZE
    assert step["completions"][1]["answer"]["text"].startswith("answer 2 of other")
    assert step["completions"][3]["o"].failure.message.startswith("boom")
    lr = next(row for row in page.values["settings"]["algorithm"] if row.name == "lr")
    assert (lr.value, lr.changed) == (0.25, True)
    assert {one["name"] for one in page.values["played"]} >= {"eval/function/depth"}
    assert "Hardest held-out tasks" not in text  # all are solved
    assert "Held-out tasks, all solved" in text


async def test_secrets_are_not_among_the_settings(tmp_path: Path) -> None:
    config = filled.config(tmp_path, None)
    config["agent"]["env"] = {"MY_KEY": "hunter2"}
    config["upstreams"] = {"x": {"api_key": "hunter2", "max_tokens": 7}}
    found = front.tables(config)
    assert "hunter2" not in str(found)
    assert ("x.max_tokens", 7, True) in found["upstreams"]


def test_an_explanation_is_a_table_and_loses_nothing() -> None:
    text = (
        "r/0, trained by step 3, grpo\nrewards\n  role:outcome of solver = 0.5 (verifier)\n"
        "call c-0, solver, 22 tokens by v1-2\n"
        "    1 x GroupRelative(Outcome(), base='mean'): value 0.5, baseline 0.25 .. 1e-05, "
        "scale missing, advantage -0.25\n"
        "  sum: advantage -0.25\n"
        "  weight in the loss (psi): -0.1 per token (advantage -0.25 x gates 1 x share 0.4)\n"
        "  the step used advantage 1, but the chain above results in 2\n"
        "call c-1, solver, 1 tokens\n  not in the loss\n"
        "gates and penalties\n  Gate(Clip(0.2))\n"
    )
    found = front.read(text, [factories.call(id="c-0")])
    assert found["rewards"] == [
        {"name": "role:outcome of solver", "value": "0.5", "source": "verifier"}
    ]
    first, second = found["calls"]
    assert (first["at"], first["by"], first["weight"]) == (0, "v1-2", "-0.1")
    assert first["steps"][0]["words"] == "1 × Compared with the group"  # noqa: RUF001
    assert first["steps"][0]["numbers"]["baseline"] == "0.25 .. 1e-05"
    assert first["steps"][0]["numbers"]["scale"] == "missing"
    assert first["factors"][-1] == ("share", "0.4")
    assert first["notes"][0].startswith("the step used")
    assert (second["notes"], found["gates"]) == (["not in the loss"], ["Gate(Clip(0.2))"])
    assert (first["chain"], second["chain"]) == (True, True)  # no indents
    plain = "Its outcome 1 is above 0.5, the mean of the 2 of its task."
    found = front.read(f"{plain}\n{text}", [factories.call(id="c-0")])
    assert (found["verdict"], found["notes"]) == ([plain], [])
    refused = front.read("r/0 is not trained: it is an evaluation")
    assert refused["verdict"] == ["r/0 is not trained: it is an evaluation"]
    shown = {"run": "r", "id": "r/0", "o": factories.rollout(), **found}
    page = render(Page("explain.html", "r/0 explained", shown))
    assert page.index(plain) < page.index("Weight in the loss, per token")  # the sentence first
    assert page.index("Weight in the loss, per token") < page.index("Gates and penalties")


async def test_the_explanation_of_a_trained_rollout_is_computed_once(
    filled_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []

    async def explanation(self: object, store: str, id: str) -> str:
        computed.append(id)
        return "Its outcome 1 is the best."

    monkeypatch.setattr(server.ViewApp, "_explanation", explanation)
    async with asked(filled_store) as client:
        for _ in range(2):
            said = (await client.get("/explain/run/train/g0000003/0000")).text
            assert "Its outcome 1 is the best." in said
    assert computed == ["run/train/g0000003/0000"]


@pytest.mark.parametrize("many", [False, True])
def test_a_long_message_is_clipped_where_it_is_said(many: bool) -> None:
    text = clipped("why " * (150 if many else 3))
    assert (len(text), text.endswith("…")) == ((400, True) if many else (12, False))


def test_the_default_preset_is_told_by_what_it_amounts_to() -> None:
    words = summaries.preset_in_words
    assert [words("dapo"), words("auto+tis"), words("auto", 0.25)] == [
        "dapo", "auto: grpo+tis", "auto: grpo, 25% by state",
    ]  # fmt: skip
    given = {"algorithm": {"preset": "auto"}, "steps": 3, "root": "/x"}
    for model, called in (
        ("/x/runs/mine/policy", "mine/policy"),
        ("/x/runs/mine/checkpoints/000025.2", "mine, 000025.2"),
    ):
        assert summaries.facts(given | {"policy": {"model": model}})["model"] == called


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"input": "Which  city?\n", "answer": "x"}, "Which city?"),
        ({"input": {"game": "kuhn", "seed": 7}}, "game kuhn, seed 7"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages Hi"),
        ({"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]}, "U"),
        ({"input": "x" * 500}, "x" * 139 + "…"),
        ({}, ""),
        (None, ""),
        ("text", "text"),
    ],
)
def test_a_task_in_a_line(task: Any, expected: str) -> None:
    assert records.gist(task) == expected


def test_charts_fit_what_they_show() -> None:
    names = ["reward/mean", "role/a/reward", "role/b/reward", "sampler/kl", "grad_norm"]
    names += ["reward/format/mean", "reward/format/a/mean", "reward/format/b/mean"]
    curve = [(0, 0.25), (1, 0.5)]
    series = dict.fromkeys(names, curve) | {"sampler/kl": [(0, 7e-14), (1, 6e-14)]}
    series["reward/format/b/mean"] = [(0, 0.1), (1, 0.2)]
    roles, form = (summaries.drawn(one, series) for one in summaries.rewards(names))
    assert roles is not None
    assert form is not None
    assert [label for label, _ in roles["lines"]] == ["a, b"]  # they share their reward
    assert [label for label, _ in form["lines"]] == ["a", "b"]
    assert form["unit"]
    drawn = {one.name: summaries.drawn(one, series) for one in summaries.training(names, [])}
    assert {name: one["quiet"] for name, one in drawn.items() if one} == {
        "grad_norm": False, "sampler/kl": True
    }  # fmt: skip
    assert summaries.drawn(summaries.single("none"), series) is None


def test_the_code_of_a_run_is_kept_with_it(tmp_path: Path) -> None:
    assert records.origin(str(tmp_path / "nowhere")) == {}
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "agent.py").write_text("x = 1")
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    ((commit, kept),) = records.origin(str(tmp_path)).items()
    assert len(commit) == 40
    assert kept == {"changed": False, "agentrl": agentrl.__version__}
    (tmp_path / "agent.py").write_text("x = 2")
    assert records.origin(str(tmp_path))[commit]["changed"]


async def test_a_pause_between_two_starts_is_no_work(tmp_path: Path) -> None:
    """`took` is what steps took, not the time since the run was created."""
    clock = 1e9

    def now() -> float:
        return clock

    async with open_store(f"sqlite:///{tmp_path / 'store.db'}", clock=now) as store:
        epoch = (await store.open_run("run", {})).epoch
        for step, pause in enumerate((0.0, 3600.0)):
            clock += 10.0 + pause
            times = {"time/rollouts": 7.0, "time/update": 3.0, "time/eval": 2.5}
            row = factories.commit(step, epoch=epoch, run="run", metrics=times)
            await store.commit_step(row)
        page = await Pages(store).run("run", {})
    assert re.search(r"<dt>took</dt><dd[^>]*>25\s", render(page))


CANARY = "sk-canary"


def unpacked(file: Path) -> str:
    """All of an exported file, with its pages as a browser unpacks them."""
    text = file.read_text()
    chunks = re.findall(r'id="chunk-\d+">([^<]*)<', text)
    pages = [gzip.decompress(base64.b64decode(one)).decode() for one in chunks]
    return unquote("\n".join([text, *pages]))


async def fill_with_canaries(url: str, folder: Path) -> str:
    """A run in which every text that an agent, a task or a setting has is a canary of its own;
    returns the rollout. One stands where a page cuts a text."""
    numbers = itertools.count()

    def name() -> str:
        return f"{CANARY}{next(numbers):03}x"

    run = name()
    settings = {name(): 1, name(): {name(): [name()]}, "agent": {"env": {name(): name()}}}
    async with open_store(url) as store:
        state = await store.open_run(run, filled.config(folder, None) | settings)
        for purpose in (Purpose.EVAL, Purpose.TRAIN):
            group = f"{run}/{purpose.value}/{name()}"
            new = NewRollout(
                id=f"{group}/{name()}", run=run, group=group, index=0, step=0, purpose=purpose,
                task={name(): {name(): name()}, "input": name()}, max_attempts=1,
                seats={name(): name()},
            )  # fmt: skip
            await store.enqueue([new])
            (attempt,) = await store.claim(1, runner="t", lease=60.0, run=run, timeout=5.0)
            cut = "a" * (records.MAX_TEXT_CHARS - 4) + name()
            talk = [
                {"role": "user", "content": cut},
                {"role": name(), "content": [{"type": "text", "text": name()}]},
                {"role": "tool", "content": {name(): name()}, "name": name()},
            ]
            tool = {"function": {"name": name(), "arguments": json.dumps({name(): name()})}}
            answer = {"role": "assistant", "content": name(), "tool_calls": [tool]}
            made = [
                filled.call(
                    attempt, i, talk, answer=answer, role=name(), policy=name(), finish=name()
                )
                for i in range(2)
            ]
            await store.add_transitions(made)
            span = Span(
                id="00000000000000aa", attempt=attempt.id, parent=None, name=name(), kind=name(),
                start=1, end=2,
            )  # fmt: skip
            rewards = [
                Reward(value=1.0, name=name(), source=name(), note=name()),
                Reward(value=1.0),
            ]
            rewards.append(Reward(value=1.0, scope=Scope.ROLE, target=name()))
            outcome: Any = {"rewards": rewards, "result": {name(): name()}}
            if purpose is Purpose.EVAL:
                outcome = {
                    "failure": Failure(kind=ErrorKind.AGENT, message=name(), traceback=name())
                }
            given = Outcome(attempt=attempt.id, fence=attempt.fence, spans=[span], **outcome)
            await store.finish([given])
        await store.claim_groups(run, state.epoch, 1, timeout=5.0)
        metrics = {f"reward/{name()}": 1.0, "selfplay/elo/" + name(): 1.0, "reward/mean": 1.0}
        commit: Any = {
            "run": run,
            "epoch": state.epoch,
            "step": 0,
            "groups": [group],
            "checkpoint": None,
        }
        await store.commit_step(StepCommit(**commit, versions={name(): 1}, metrics=metrics))
        version: Any = {"run": run, "policy": name(), "version": 1, "base_url": f"http://{name()}"}
        await store.publish(PolicyVersion(**version, model=name()))
    return new.id


@pytest.mark.parametrize("pattern", [rf"{CANARY}\w+", rf"(?i){CANARY.upper()}\d+"])
def test_a_redacted_export_has_no_match_in_any_byte(tmp_path: Path, pattern: str) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    rollout = asyncio.run(fill_with_canaries(url, tmp_path))

    async def write(name: str, redact: str) -> str:
        async with open_store(url, readonly=True) as store:
            await export(store, rollout.partition("/")[0], tmp_path / name, redact=redact)
        return unpacked(tmp_path / name)

    shown, hidden = asyncio.run(write("all.html", "")), asyncio.run(write("x.html", pattern))
    assert len(set(re.findall(rf"{CANARY}\d+x", shown))) > 60
    assert re.findall(rf".{{0,80}}{CANARY[:4]}.{{0,60}}", hidden) == []
    index = json.loads(re.search(r'id="index">([^<]*)<', hidden)[1])
    linked = set(re.findall(r'href=\\?"(/rollout/[^"?#\\]+)', hidden))
    assert len([one for one in index if one.startswith("/rollout/")]) == 2
    assert linked
    assert linked <= index.keys()


def test_a_headline_says_what_has_no_score() -> None:
    """100 % of 44 tasks, of which 40 have no score, is no success."""
    curves = {"eval/score": [(0, 0.5), (4, 1.0)], "eval/score_missing": [(0, 0.0), (4, 40.0)]}
    found = summaries.verdict(curves)
    assert (found.first.missing, found.last.missing) == (0.0, 40.0)
    shown = environment().from_string(
        '{% from "macros.html" import change with context %}{{ change(v) }}'
    )
    assert "40 rollouts without a score" in shown.render(v=found, export=False)
    assert "without" not in shown.render(
        v=summaries.verdict({"eval/score": [(0, 1.0)]}), export=False
    )
    words = view_command._score(found, found.last, named=False)
    assert words == "100.0%, 40 rollouts without a score"
