"""The number of a step is the same wherever people and models read or give it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.core.config import RunConfig
from agentrl.core.types import (
    Attempt,
    PolicyVersion,
    Purpose,
    Reward,
    StepRow,
    numbered,
    step_in_words,
    step_number,
    stored_steps,
)
from agentrl.store import Store, open_store
from agentrl.telemetry.console import Progress
from agentrl.telemetry.otlp import spans_of
from agentrl.view.pages import Page, Pages
from agentrl.view.templates import render
from tests import factories

TRAINED, SCORED = "r/train/g0000007/0", "r/eval/000005/score/0"


def played(attempt: Attempt) -> Any:
    call = factories.call(f"{attempt.id}-0", attempt=attempt.id, policy="policy", version=0)
    return [call], {"rewards": [Reward(value=float(attempt.rollout.index))]}


async def fill(store: Store, config: RunConfig) -> None:
    """Six steps, of which only the last trains rollouts, and evaluations before and after five."""
    state = await store.open_run("r", msgspec.to_builtins(config))
    served = {"version": 0, "base_url": "http://x/v1", "model": "m"}
    await store.publish(PolicyVersion(run="r", policy="policy", **served))
    for step in range(6):
        if step in (0, 5):
            group = f"r/eval/{step:06}/score"
            asked = factories.queue(group, step=step, purpose=Purpose.EVAL)
            await factories.play(store, asked, played)
            await store.log("r", step, {"eval/score": step / 10})
        groups = ["r/train/g0000007"] if step == 5 else []
        if groups:
            asked = factories.queue(groups[0], 2, step=step, task={"input": "x"})
            await factories.play(store, asked, played)
            await store.claim_groups("r", state.epoch, 1)
        metrics = {"reward/mean": step / 8}
        commit = factories.commit(step, groups, epoch=state.epoch, checkpoint="c", metrics=metrics)
        await store.commit_step(commit)


@pytest.fixture
async def url(tmp_path: Path) -> str:
    config = factories.config(
        tmp_path, steps=6, policy={"model": "m"}, algorithm={"preset": "grpo"}
    )
    url = f"sqlite:///{tmp_path / 'store.db'}"
    async with open_store(url) as store:
        await fill(store, config)
    return url


def words(page: Page) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", render(page)))


async def test_it_is_the_same_everywhere(url: str, tmp_path: Path) -> None:
    mcp = pytest.importorskip("agentrl.cli.mcp_server")
    tools = mcp.Tools(mcp.Runs(tmp_path, url), allow_start=False)
    async with open_store(url, readonly=True) as store:
        progress = Progress(factories.config(tmp_path, steps=6))
        await progress.update(store)
        assert progress.line(progress.committed[5]).startswith("step 6/6")
        assert progress.scores_line(progress.rows[5]).startswith("after step 5:")
        trace = await store.trace(TRAINED)
        assert trace is not None
        assert spans_of(trace)[0].attributes["agentrl.step"] == 6
        await looked_at(Pages(store))
    from agentrl.explain import explain_rollout

    lines = await explain_rollout(url, TRAINED, tokens=False)
    assert f"{TRAINED}, trained by step 6, grpo" in "\n".join(lines)
    found = await tools.search_rollouts("r")
    assert f"{TRAINED}: train, step 6, " in found
    assert f"{SCORED}: eval, after step 5, " in found
    assert ": eval, before training, " in found
    assert f"{TRAINED}: step 6, " in await tools.show_rollout(TRAINED)
    assert f"{SCORED}: completed, " in await tools.show_rollout(SCORED)
    curves = await tools.metrics("r", ["reward/mean", "eval/score"], last=1)
    assert '{"metric": "reward/mean", "steps": [[6, 0.625]]}' in curves
    assert '{"metric": "eval/score", "steps": [[5, 0.5]]}' in curves
    assert '"reward/mean": {"first": [1, 0.0], "last": [6, 0.625]}' in await tools.list_runs()


async def looked_at(pages: Pages) -> None:
    """The pages of `agentrl view`, and what their addresses and forms ask for."""
    step, before = await pages.step("r", 6), await pages.step("r", 0)
    assert "<h1>Step 6</h1>" in render(step)
    assert [row.id for row in step.values["groups"]] == ["r/train/g0000007"]
    assert step.values["row"].metrics == {"reward/mean": 0.625}
    assert [row["o"].id for row in step.values["completions"]] == [TRAINED, TRAINED[:-1] + "1"]
    assert "<h1>Before training</h1>" in render(before)
    assert [row.id for row in before.values["groups"]] == ["r/eval/000000/score"]
    five = (await pages.step("r", 5)).values
    assert [row.id for row in five["groups"]] == ["r/eval/000005/score"]
    assert five["row"].metrics == {"reward/mean": 0.5, "eval/score": 0.5}
    group, rollout = await pages.group("r", "r/train/g0000007"), await pages.rollout(TRAINED)
    assert "2 rollouts for training, asked for by step 6, trained by step 6" in words(group)
    assert 'href="/step/6/r"' in render(group)
    assert "trained by step 6" in words(rollout)
    assert 'href="/step/6/r"' in render(rollout)
    scored = await pages.group("r", "r/eval/000005/score")
    assert "1 rollouts for evaluation after step 5" in words(scored)
    assert 'href="/step/5/r"' in render(scored)
    for form, ids in (
        ({"from": "6", "to": "6"}, [TRAINED[:-1] + "1", TRAINED]),
        ({"from": "5", "to": "5"}, [SCORED]),
        ({"to": "0"}, ["r/eval/000000/score/0"]),
    ):
        assert [row.id for row in (await pages.find("r", form)).values["rows"]] == ids
    for form, own in (
        ({"step": "6"}, ["r/train/g0000007"]),
        ({"step": "5"}, ["r/eval/000005/score"]),
        ({"step": "5", "purpose": "train"}, []),
    ):
        assert [row.id for row in (await pages.groups("r", form)).values["groups"]] == own
    run = (await pages.run("r", {})).values["series"]
    assert run["reward/mean"][-1] == (6, 0.625)
    assert run["eval/score"] == [(0, 0.0), (5, 0.5)]
    more = await pages.series("r", {"after": "5"}, ["reward/mean", "eval/score"])
    assert more == {"reward/mean": [(6, 0.625)], "eval/score": [(5, 0.5)]}


def test_commands_read_and_take_it(url: str) -> None:
    def printed(*words: str) -> str:
        result = CliRunner().invoke(cli, [*words, "--store", url], terminal_width=120)
        assert result.exit_code == 0, result.output
        return result.output

    assert f"{TRAINED}: step 6, " in printed("show", TRAINED)
    rows = [line.split(",") for line in printed("metrics", "r", "--csv").splitlines()]
    assert rows[0] == ["step", "committed", "at", "eval/score", "reward/mean"]
    assert [row[:2] + row[3:] for row in rows[1:3] + rows[6:]] == [
        ["0", "0", "0.0", ""], ["1", "1", "", "0.0"], ["5", "1", "0.5", "0.5"],
        ["6", "1", "", "0.625"],
    ]  # fmt: skip
    mine = ("data", "mine", "d", "--run", "r", "--how", "label", "--steps")
    assert "version 1: 2 items" in printed(*mine, "6", "6")
    refused = CliRunner().invoke(cli, [*mine, "0", "5", "--store", url])
    assert "0 is not in the range x>=1" in refused.output
    nothing = CliRunner().invoke(cli, [*mine, "5", "5", "--store", url])
    assert "found nothing to learn from" in str(nothing.exception)


def test_a_number_leads_back_to_what_is_stored() -> None:
    assert stored_steps(6) == {Purpose.TRAIN: 5, Purpose.EVAL: 6}
    assert stored_steps(0) == {Purpose.EVAL: 0}
    for purpose, step in stored_steps(6).items():
        assert step_number(step, purpose) == 6
    assert step_in_words(5) == "step 6"
    assert step_in_words(-1) == "a session"


def test_the_row_of_a_number_has_the_evaluation_after_the_step() -> None:
    first = StepRow(run="r", step=0, metrics={"a": 1, "eval/b": 2}, committed=True, at=1.0)
    last = StepRow(run="r", step=1, metrics={"eval/b": 3}, committed=False, at=2.0)
    rows = [(row.step, row.committed, row.at, row.metrics) for row in numbered([first, last])]
    assert rows == [(0, False, 1.0, {"eval/b": 2}), (1, True, 1.0, {"a": 1, "eval/b": 3})]
