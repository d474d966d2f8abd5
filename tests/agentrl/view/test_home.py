"""All runs at home: stores are found, and whatever is wrong with one is a line."""

from __future__ import annotations

import html
import json
import re
import shutil
import sqlite3
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import to_builtins

from agentrl.cli.main import cli
from agentrl.core.config.run_file import resolve
from agentrl.core.errors import Invalid, NotFound, StoreError
from agentrl.core.types import RunState, StepCommit, are_shares, metric_step
from agentrl.store import open_store
from agentrl.store.run_folder import STORE_VARIABLE, find, places, store_with
from agentrl.view import summaries
from agentrl.view.pages import Page
from agentrl.view.server import Home
from agentrl.view.summaries import Verdict, facts, in_unit, read_shares, summary, verdict
from agentrl.view.templates import render
from tests.agentrl.view.filled import finish


def scores(value: float) -> dict[str, float]:
    return {"eval/score": value, "eval/score_low": value - 0.1, "eval/score_high": value + 0.1}


async def add_run(file: Path, name: str, *, first: float, last: float, lr: float = 1e-4) -> None:
    config = resolve(
        {"name": name, "root": "/agents", "policy": {"model": "tiny"}, "algorithm": {"lr": lr}},
        source="test",
    )
    async with open_store(f"sqlite:///{file}") as store:
        state: RunState = await store.open_run(name, to_builtins(config))
        for step, score in ((0, first), (1, last)):
            metrics = {"reward/mean": score, **scores(score)}
            await store.commit_step(
                StepCommit(
                    run=name, epoch=state.epoch, step=step, groups=[], versions={},
                    checkpoint=None, metrics=metrics,
                )
            )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in the places where people have them, and files that are none."""
    root = tmp_path_factory.mktemp("home")

    async def fill() -> None:
        await add_run(root / "runs/alpha/store.db", "alpha", first=0.2, last=0.8)
        await add_run(root / "runs/study/all.db", "beta", first=0.3, last=0.35, lr=0.5)
        await add_run(root / "runs/study/all.db", "gamma", first=0.9, last=0.4)
        await add_run(root / "deep/er/store.db", "alpha", first=0.1, last=0.2)
        await add_run(root / "node_modules/x/store.db", "hidden", first=0.1, last=0.2)

    finish(fill())
    (root / "runs/broken").mkdir()
    (root / "runs/broken/store.db").write_bytes(b"not a database at all" * 99)
    for name in ("foreign", "old"):
        (root / "runs" / name).mkdir()
    with sqlite3.connect(root / "runs/foreign/music.db") as conn:
        conn.execute("create table albums (title text)")
    for other in (root / "mlflow.db", root / "deep/Thumbs.db"):
        shutil.copy(root / "runs/foreign/music.db", other)
    (root / "deep/notes.db").write_text("of another program")
    with sqlite3.connect(root / "runs/old/store.db") as conn:
        conn.execute("create table runs (id text)")
        conn.execute("pragma user_version = 3")
    return root


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv(STORE_VARIABLE, raising=False)


async def listed(query: dict[str, str] | None = None, *given: str) -> Page:
    home = Home(given)
    page = await home.runs(query or {})
    await home.close()
    return page


def names(page: Page) -> list[str]:
    return [f"{line.place.label}:{line.row.run}" for line, _ in page.values["rows"]]


async def test_every_run_is_listed_and_every_bad_file_is_a_line(folder: Path) -> None:
    page = await listed()
    known = ["deep/er:alpha", "runs/alpha:alpha", "runs/study/all:beta", "runs/study/all:gamma"]
    assert sorted(names(page)) == known
    troubles = {place.label: text for place, text in page.values["troubles"]}
    assert set(troubles) == {"runs/broken", "runs/foreign/music", "runs/old"}
    assert all(troubles.values())
    text = html.unescape(render(page))
    assert "4 runs in 6 stores" in text
    assert "<b>80\u202f%</b>" in text
    assert "70\u202f% to 90\u202f%" in text
    assert re.search(r'title="algorithm.lr">lr 0.5<', text)
    assert "/at/alpha/run/alpha" in text


async def test_a_locked_store_does_not_hold_up_the_others(folder: Path) -> None:
    file = folder / "runs/locked/store.db"
    await add_run(file, "locked", first=0.1, last=0.2)
    with sqlite3.connect(file, isolation_level=None) as conn:
        conn.execute("pragma locking_mode = exclusive")
        conn.execute("pragma journal_mode = delete")
        conn.execute("begin exclusive")
        since = time.monotonic()
        home = Home()
        page = await home.runs({})
        assert time.monotonic() - since < 20
        conn.execute("rollback")
    conn.close()
    assert "runs/locked" in {place.label for place, _ in page.values["troubles"]}
    assert "runs/alpha:alpha" in names(page)
    await home.close()
    file.unlink()


async def test_sorted_and_filtered() -> None:
    after = [
        line.row.verdict.last.value for line, _ in (await listed({"sort": "after"}))[2]["rows"]
    ]
    assert after == [0.8, 0.4, 0.35, 0.2]
    up = await listed({"sort": "gain", "order": "up"})
    assert names(up)[0] == "runs/study/all:gamma"
    assert names(await listed({"q": "lr=0.5"})) == ["runs/study/all:beta"]
    assert names(await listed({"q": "study gamma"})) == ["runs/study/all:gamma"]
    with pytest.raises(Invalid, match="sort must be one of"):
        await listed({"sort": "beauty"})


async def test_a_store_is_read_again_only_after_a_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, read = Home(), []
    await home.lines()
    whole = home._summarise

    async def counted(place, known):
        read.append(place.label)
        await whole(place, known)

    monkeypatch.setattr(home, "_summarise", counted)
    await home.lines()
    assert read == []
    before = await home.cursor()
    async with open_store(f"sqlite:///{folder / 'runs/alpha/store.db'}") as store:
        await store.log("alpha", 5, scores(0.85))
    assert await home.cursor() > before
    lines = await home.lines()
    assert read == ["runs/alpha"]
    found = {line.place.label: line.row.verdict.last for line in lines}["runs/alpha"]
    assert found is not None
    await home.close()


async def test_runs_of_several_stores_are_compared() -> None:
    home = Home()
    page = await home.compare(["alpha/alpha", "study~all/beta"])
    assert page.values["settings"]["algorithm.lr"] == [1e-4, 0.5]
    assert page.values["labels"] == ["alpha", "beta"]
    both = await home.compare(["alpha/alpha", "deep~er/alpha"])
    assert both.values["labels"] == ["alpha/alpha", "deep~er/alpha"]
    with pytest.raises(NotFound):
        await home.compare(["alpha/alpha", "study~all/none"])
    assert await home.run_anywhere("gamma") == "/at/study~all/run/gamma"
    with pytest.raises(NotFound, match="2 stores have"):
        await home.run_anywhere("alpha")
    await home.close()


async def test_addresses_of_a_store_begin_with_its_key() -> None:
    home = Home()
    pages = await home.pages("study~all")
    text = render(await pages.run("beta", {}), base=home.base("study~all"))
    assert 'href="/at/study~all/groups/beta"' in text.replace("%7E", "~")
    own = re.findall(r'href="(/[^"]*)"', text)
    assert {one.split("/")[1] for one in own} == {"", "at", "static"}
    await home.close()


def test_commands_find_the_store_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_with("alpha") == f"sqlite:///{folder / 'runs/alpha/store.db'}"
    beta = f"sqlite:///{folder / 'runs/study/all.db'}"
    assert store_with("beta") == store_with("beta/train/g0000000/0000") == beta
    with pytest.raises(NotFound, match="did you mean 'gamma'"):
        store_with("gama")
    with pytest.raises(StoreError, match="2 stores have a run 'alpha'"):
        find("alpha")
    monkeypatch.setenv(STORE_VARIABLE, f"sqlite:///{folder / 'node_modules/x/store.db'}")
    assert store_with("hidden").endswith("node_modules/x/store.db")


def test_places_that_are_named(folder: Path) -> None:
    assert [place.label for place in places(["runs/study"])] == ["runs/study/all"]
    assert [place.url for place in places(["https://KEY@host:99"])] == ["https://KEY@host:99"]
    with pytest.raises(NotFound, match="nowhere"):
        places(["nowhere"])


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        ({"eval/score": [(0, 0.2), (9, 0.8)], "eval/score_high": [(0, 0.3), (9, 0.9)],
          "eval/score_low": [(0, 0.1), (9, 0.7)]}, ("held-out", "better", True)),
        ({"eval/score": [(0, 0.2), (9, 0.25)], "eval/score_high": [(0, 0.3), (9, 0.35)],
          "eval/score_low": [(0, 0.1), (9, 0.15)]}, ("held-out", "same", True)),
        ({"eval/score": [(0, 5.0), (9, 2.0)]}, ("held-out", "worse", False)),
        ({"eval/score": [(0, 0.5), (9, 0.25)], "eval/score/seller": [(0, 30.0), (9, 40.0)]},
         ("held-out", "worse", False)),
        ({"eval/function/k/exploitability": [(0, 0.4), (9, 0.3)]},
         ("k/exploitability", "better", False)),
        ({"reward/mean": [(i, i / 20) for i in range(20)]}, ("training reward", "same", True)),
        ({}, ("held-out", "same", False)),
        ({"eval/score": [(0, float("nan"))]}, ("held-out", "same", False)),
    ],
)  # fmt: skip
def test_the_verdict_of_a_run(curves: dict, expected: tuple[str, str, bool]) -> None:
    found: Verdict = verdict(curves)
    assert (found.name, found.outcome, found.percent) == expected


async def test_percentages_are_decided_as_on_the_console(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = [
        {"eval/score": 0.5},
        {"eval/score": 0.5, "eval/score/seller": 0.9, "eval/score_missing": 7.0},
        {"reward/mean": 0.5, "reward/std": 0.4},
        {"eval/score/seller": 40.0},
        {"reward/mean": 0.5, "reward/std": 0.8},
        {"eval/sampled/pass@4_high": 1.5},
    ]
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        found = []
        for number, row in enumerate(rows):
            await store.open_run(f"run{number}", {})
            await store.log(f"run{number}", 0, row)
            found.append(await read_shares(store, f"run{number}"))
            state = await store.run(f"run{number}")
            assert state is not None
            assert (await summary(store, state)).percent == found[-1]
    assert found == [True, True, True, False, False, False]
    assert found == [are_shares([row]) for row in rows]


def test_facts_of_settings_of_any_version() -> None:
    assert facts({}) == {}
    found = facts({"policy": {"model": "/a/b/model"}, "steps": 3, "algorithm": {"lr": 1e-6}})
    assert found == {"model": "b/model", "planned steps": "3", "learning rate": "1e-06"}
    assert facts({"policy": {"model": "../tiny"}, "root": "/a/b"}) == {"model": "tiny"}
    assert "planned steps" not in facts({"steps": 10**9})  # until it is stopped, as a live run
    assert facts({"policy": {"model": "Qwen/Qwen2.5-0.5B"}, "root": "/a"}) == {
        "model": "Qwen/Qwen2.5-0.5B"
    }
    assert facts({"policy": {"model": "gpt2"}}) == {"model": "gpt2"}
    assert not in_unit([[(0, 1.5)]])
    assert in_unit([[(0, 1.0)], [(0, 0.0)]])


def test_compare_says_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampled scores too, and neither where a run is nor what its metric is called twice."""
    monkeypatch.chdir(tmp_path)

    async def fill() -> None:
        for name, lr in (("a", 1e-4), ("b", 2e-4)):
            config = resolve({"name": name, "file": f"/x/{name}.toml", "algorithm": {"lr": lr}},
                             source="test")  # fmt: skip
            async with open_store(config.store) as store:
                await store.open_run(name, to_builtins(config))
                for step, score in ((0, 0.2), (2, 0.9)):
                    sampled = {key.replace("score", "sampled", 1): x / 2
                               for key, x in scores(score).items()}  # fmt: skip
                    await store.log(name, step, scores(score) | sampled)

    finish(fill())
    said = CliRunner().invoke(cli, ["compare", "a", "b"]).output
    rows = [line.split("│")[1].strip() for line in said.splitlines() if "│" in line]
    assert rows == [
        "held-out, before", "held-out, after", "held-out, change", "sampled held-out, before",
        "sampled held-out, after", "sampled held-out, change", "state", "algorithm.lr",
    ]  # fmt: skip
    assert said.count("better") == 4
    assert "45.0% (40.0% to 50.0%)" in said
    line = json.loads(CliRunner().invoke(cli, ["compare", "a", "--json"]).output)
    assert (line["sampled_before"]["value"], line["after"]["value"]) == (0.1, 0.9)
    assert line["outcome"] == "better"


def test_a_score_of_one_task_is_neither_better_nor_worse() -> None:
    """It has no interval; a measure of the user's own has none either."""
    assert verdict({"eval/score": [(0, 0.0), (9, 1.0)]}).outcome == "same"
    assert verdict({"eval/function/f": [(0, 0.0), (9, 1.0)]}).outcome == "better"


def test_the_reward_of_the_first_step_is_at_one() -> None:
    curve = [(0, 0.25), (1, 0.5)]
    found = verdict({"reward/mean": curve})
    assert found.first is not None
    assert found.last is not None
    assert (found.first.step, found.last.step) == (1, 2)
    series = {"reward/mean": curve, "eval/score": [(0, 0.1), (2, 0.6)]}
    chart = summaries.main(list(series))
    assert chart is not None
    drawn = summaries.drawn(chart, summaries.by_number(series))
    assert drawn is not None
    starts = [one["path"].split(" ")[0] for one in drawn["paths"]]
    assert starts == ["M0.0", "M150.0"]  # of 300 for steps 0 to 2
    measured = ("eval/score", "eval/function/f", "time/eval", "run/ended", "a/eval/score")
    trained = ("grad_norm", "time/update")
    assert [metric_step(name, 0) for name in (*measured, *trained)] == [0] * 5 + [1] * 2
