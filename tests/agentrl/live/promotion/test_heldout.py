"""Versions of a live run play its held-out tasks, in real processes beside it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.live import LiveConfig
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.live import promotion
from agentrl.live.records import Event, HeldOutScore, Lanes, LiveState, Version, live_state
from agentrl.store import open_store
from tests.agentrl.live.promotion.played import Shop
from tests.agentrl.live.promotion.test_return import agentrl
from tests.agentrl.live.shop import RUN, move, running, until

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


SCORE = HeldOutScore(version=0, score=0.5, low=0.4, high=0.6, tasks=4)


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
    known = LiveState(
        versions={number: version(number) for number in (0, 1, 2, 4)},
        events=[Event(time=0.0, kind="candidate", version=4, lanes=lanes, why="")],
    )
    assert promotion.unscored(LiveState(), "") is None
    for digest in ("as they are", "as they are after an edit"):
        for number in (0, 4):
            assert promotion.unscored(known, digest) == version(number)
            known.scores[number] = replace(SCORE, version=number, digest=digest)
            both = promotion.comparable(known, 4, 0)
            assert (both == (None, None)) == (digest != "as they are" and number == 0)
        assert promotion.unscored(known, digest) is None


def test_a_changed_task_agent_or_verifier_is_another_measurement(tmp_path: Path) -> None:
    rewards = {"path": "shop.py:verify", "rewards": {"style": "style.py:polite"}}
    config = resolve(given(tmp_path, verifier=rewards), source="test")
    seen = [promotion.digest_of(config), promotion.digest_of(config)]
    assert seen[0] == seen[1]
    texts = {"tasks.jsonl": '{"input": "7"}', "shop.py": AGENT + "\n", "style.py": "x = 1\n"}
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
        seen.append(promotion.digest_of(config))
    seen.append(promotion.digest_of(replace(config, eval=replace(config.eval, temperature=1.0))))
    sampling = replace(config.sampling, max_tokens=7)
    seen.append(promotion.digest_of(replace(config, sampling=sampling)))
    (tmp_path / "tasks.jsonl").unlink()
    seen.append(promotion.digest_of(config))
    assert len(set(seen)) == 7


NAN = math.nan


@pytest.mark.parametrize(
    ("outcomes", "mean", "low", "high"),
    [
        ([1.0, 1.0, 0.0, 1.0], 0.75, 0.256, 0.962),
        # Nobody knows whether the last two would have been solved.
        ([1.0, 1.0, NAN, NAN], 1.0, 0.125, 1.0),
        ([0.0, 0.0, NAN, NAN], 0.0, 0.0, 0.875),
        ([3.0, 1.0, NAN, 2.0], 2.0, 0.235, 3.188),
        ([1.0], 1.0, None, None),
    ],
)
def test_a_score_says_how_many_rollouts_failed_and_what_they_may_be_worth(
    outcomes: list[float], mean: float, low: float | None, high: float | None
) -> None:
    found = promotion.score_of(4, [*enumerate(outcomes)], "d")
    assert (found.score, found.tasks) == (mean, len(outcomes))
    assert found.missing == sum(map(math.isnan, outcomes))
    assert [found.low, found.high] == (
        [None, None] if low is None else pytest.approx([low, high], abs=0.01)
    )
    assert msgspec.json.decode(msgspec.json.encode(found), type=HeldOutScore) == found
    with pytest.raises(AgentRLError, match="no held-out task has a reward"):
        promotion.score_of(4, [(0, NAN)], "d")


async def test_what_is_decided_against_is_not_played_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = resolve(given(tmp_path, store=f"sqlite:///{tmp_path}/store.db"), source="test")
    monkeypatch.setattr(promotion, "LANES_PAUSE", 0.01)
    began, ended, both = list[int](), list[int](), asyncio.Event()

    async def scored(config: RunConfig, version: Version, digest: str) -> HeldOutScore:
        promotion.folder_of(config, version.version, digest).mkdir(parents=True)
        began.append(version.version)
        try:
            if version.version:
                both.set()
                await asyncio.Event().wait()
        finally:
            ended.append(version.version)
        return replace(SCORE, version=version.version, digest=digest)

    monkeypatch.setattr(promotion, "scored", scored)
    async with open_store(config.store) as store:
        await store.open_run(RUN, {})
        await Shop(store, config).opened(0, 4)
        watch = asyncio.create_task(promotion.evaluate_heldout(store, config))
        await both.wait()
        await move(store, Lanes(serving=0), kind="dropped", version=4)

        async def said() -> bool:
            return "version 4: not played further, it is in no lane now" in caplog.text

        with caplog.at_level("INFO"):
            await until(said, what="the evaluation ends", seconds=20.0)
        watch.cancel()
        known = await live_state(store, RUN)
    assert began == [0, 4]
    assert ended == [0, 4]
    assert [*known.scores] == [0]
    folders = (tmp_path / "runs/heldout").iterdir()
    assert [*folders] == []


def test_an_evaluation_has_ports_and_a_store_of_its_own(tmp_path: Path) -> None:
    ports = {"runner": {"port": 8080}, "engine": {"port": 8000}}
    config = resolve(given(tmp_path, **ports), source="test")
    made = promotion.evaluation_of(config, version(4), promotion.folder_of(config, 4, "0123456789"))
    assert (made.runner.port, made.engine.port, made.steps) == (0, 0, 0)
    assert made.store == f"sqlite:///{tmp_path}/runs/heldout/4-01234567/store.db"
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
    class Failing(promotion.Child):
        async def start(self) -> None:
            self.log.write_text("agentrl: error: there is no model x\n")

        async def wait(self) -> int:
            return 2

    monkeypatch.setattr(promotion, "Child", Failing)
    config = resolve(given(tmp_path), source="test")
    promotion.folder_of(config, 4, "of other tasks").mkdir(parents=True)
    with pytest.raises(AgentRLError, match="there is no model x"):
        await promotion.scored(config, version(4), promotion.digest_of(config))
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
                known = await live_state(store, RUN)
                return known.lanes is not None and known.lanes.serving >= number

            return found

        await agentrl(shop, "offer", str(tmp_path / "runs/shop/versions/policy-0"))
        answered = client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "hello"}]
        )
        assert (await answered).choices  # it serves while the tasks are played
        await until(serving(1), what="the candidate is promoted, once both are scored")
        known = await live_state(store, RUN)
        assert {(one.score, one.tasks) for one in known.scores.values()} == {(0.75, 4)}
        assert known.events[-1].evidence["held_out"] == [0.75, 0.75]
        assert list((tmp_path / "runs/shop/heldout").iterdir()) == []
