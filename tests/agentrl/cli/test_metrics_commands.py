"""`agentrl metrics` on a store with two steps and an evaluation."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.core.errors import NotFound
from agentrl.store import open_store
from tests import factories


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'store.db'}"

    async def fill() -> None:
        async with open_store(url) as store:
            state = await store.open_run("r", {})
            for step, metrics in enumerate([{"a": 1.0}, {"a": 2.0, "b/[/c]": float("nan")}]):
                commit = factories.commit(step, epoch=state.epoch, checkpoint="", metrics=metrics)
                await store.commit_step(commit)
            await store.log("r", 0, {"eval/score": 0.25})
            await store.log("r", 2, {"eval/score": 0.5})

    asyncio.run(fill())
    return url


def metrics(url: str, *arguments: str) -> str:
    result = CliRunner().invoke(cli, ["metrics", "r", "--store", url, *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_csv_is_empty_where_nothing_is_known(url: str) -> None:
    rows = list(csv.DictReader(metrics(url, "--csv").splitlines()))
    assert [{key: row[key] for key in row if key != "at"} for row in rows] == [
        {"step": "0", "committed": "0", "a": "", "b/[/c]": "", "eval/score": "0.25"},
        {"step": "1", "committed": "1", "a": "1.0", "b/[/c]": "", "eval/score": ""},
        {"step": "2", "committed": "1", "a": "2.0", "b/[/c]": "", "eval/score": "0.5"},
    ]


def test_json_is_an_object_for_each_stored_row(url: str) -> None:
    rows = [json.loads(line) for line in metrics(url, "--json").splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["metrics"] == {"a": 2.0, "b/[/c]": None}


def test_the_table_has_first_and_last(url: str) -> None:
    line = next(line for line in metrics(url).splitlines() if line.startswith("│ a "))
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["a", "1", "1", "2", "2"]


def test_an_unknown_run_is_a_sentence(url: str) -> None:
    with pytest.raises(NotFound, match=r"no run 'other'.*\['r'\]"):
        CliRunner().invoke(
            cli, ["metrics", "other", "--store", url], standalone_mode=False, catch_exceptions=False
        )
