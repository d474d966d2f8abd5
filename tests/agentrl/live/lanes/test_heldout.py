"""Versions of a live run play its held-out tasks, in real processes beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import resolve
from agentrl.errors import AgentRLError, ConfigError
from agentrl.live.lanes import heldout
from agentrl.live.records.documents import Event, HeldOutScore, Lanes, Told, Version, told
from agentrl.live.records.table import LiveConfig
from tests.agentrl.live.lanes.test_return import agentrl
from tests.agentrl.live.shop import RUN, running, until

AGENT = """
import os

import httpx

URL = os.environ["OPENAI_BASE_URL"]


async def agent(text):
    async with httpx.AsyncClient(timeout=60) as client:
        asked = {"messages": [{"role": "user", "content": text}]}
        answer = (await client.post(f"{URL}/chat/completions", json=asked)).raise_for_status()
        return answer.json()["choices"][0]["message"]["content"]


def verify(task, result):
    return float(task["input"] != "3")
"""
TASKS = [{"input": str(number)} for number in range(4)]


def version(number: int) -> Version:
    return Version(version=number, step=number, path=f"versions/policy-{number}", offered=0.0)


def given(folder: Path, **settings: Any) -> dict[str, Any]:
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    (folder / "shop.py").write_text(AGENT)
    return {
        "name": RUN, "root": str(folder), "output": str(folder / "runs"),
        "policy": {"model": "x"}, "live": {"running": True}, "agent": {"path": "shop.py:agent"},
        "tasks": {"heldout": "tasks.jsonl"}, "verifier": {"path": "shop.py:verify"},
    } | settings  # fmt: skip


def test_the_serving_version_is_scored_then_its_candidate_each_once() -> None:
    lanes = Lanes(serving=0, candidate=4, previous=1)
    known = Told(
        versions={number: version(number) for number in (0, 1, 2, 4)},
        events=[Event(time=0.0, kind="candidate", version=4, lanes=lanes, why="")],
    )
    assert heldout.unscored(Told()) is None
    for number in (0, 4):
        assert heldout.unscored(known) == version(number)
        known.scores[number] = HeldOutScore(version=number, score=0.5, low=0.4, high=0.6, tasks=4)
    assert heldout.unscored(known) is None


def test_an_evaluation_has_ports_and_a_store_of_its_own(tmp_path: Path) -> None:
    ports = {"runner": {"port": 8080}, "engine": {"port": 8000}}
    made = heldout.evaluation_of(resolve(given(tmp_path, **ports), source="test"), version(4))
    assert (made.runner.port, made.engine.port, made.steps) == (0, 0, 0)
    assert made.store == f"sqlite:///{tmp_path}/runs/heldout/4/store.db"
    assert made.policy.model == f"{tmp_path}/runs/versions/policy-4"
    assert made.live == LiveConfig()
    assert made.plays_rollouts


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tasks": {"train": "tasks.jsonl"}}, "tasks: a live run learns from its sessions: keep"),
        ({"tasks": {"heldout": "t.jsonl", "order": "difficulty"}}, "keep only heldout and columns"),
        ({"agent": {}}, "tasks.heldout is played by the run file's agent: set agent.path"),
    ],
)
def test_what_a_live_run_has_no_tasks_for_is_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(given(tmp_path, **settings), source="test")


async def test_an_evaluation_that_fails_is_a_sentence_and_played_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(heldout.Child):
        async def start(self) -> None:
            self.log.write_text("agentrl: error: there is no model x\n")

        async def wait(self) -> int:
            return 2

    monkeypatch.setattr(heldout, "Child", Failing)
    config = resolve(given(tmp_path), source="test")
    with pytest.raises(AgentRLError, match="there is no model x"):
        await heldout.scored(config, version(4))
    assert list((tmp_path / "runs/heldout").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_live_run_scores_what_it_serves(tmp_path: Path, tiny_model_dir: Path) -> None:
    given(tmp_path)
    settings = (
        "tasks.heldout=tasks.jsonl", "agent.path=shop.py:agent", "verifier.path=shop.py:verify",
        "live.promotion.rule=always",
    )  # fmt: skip
    async with running(tmp_path, tiny_model_dir, *settings) as (shop, store, client):

        def serving(number: int) -> Callable[[], Coroutine[Any, Any, bool]]:
            async def found() -> bool:
                known = await told(store, RUN)
                return known.lanes is not None and known.lanes.serving >= number

            return found

        await agentrl(shop, "offer", str(tmp_path / "runs/shop/versions/policy-0"))
        answered = client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "hello"}]
        )
        assert (await answered).choices  # it serves while the tasks are played
        await until(serving(1), what="the candidate is promoted, once both are scored")
        known = await told(store, RUN)
        assert {(one.score, one.tasks) for one in known.scores.values()} == {(0.75, 4)}
        assert known.events[-1].evidence["held_out"] == [0.75, 0.75]
        assert list((tmp_path / "runs/shop/heldout").iterdir()) == []
