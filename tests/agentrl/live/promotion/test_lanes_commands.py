"""`agentrl live status`, `promote`, `rollback` and `offer`, in a terminal."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentrl.cli import live as module
from agentrl.cli.main import cli
from agentrl.core.errors import ConfigError, Conflict
from agentrl.live.records import GIVEN, Lanes
from agentrl.store import open_store
from tests.agentrl.live.promotion.played import RUN, Shop, config

Act = Callable[[Shop], Coroutine[Any, Any, Any]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    text = f'name = "{RUN}"\nstore = "sqlite:///{tmp_path}/store.db"\n'
    (tmp_path / "shop.toml").write_text(text)
    return tmp_path / "shop.toml"


def fill(file: Path, *versions: int, act: Act | None = None) -> Any:
    """A store with these versions; returns what `act` does."""

    async def filled() -> Any:
        settings = config(file.parent, wait=0.0, share=0.5)
        async with open_store(settings.store) as store:
            shop = Shop(store, settings)
            if versions:
                await shop.opened(*versions)
            return await act(shop) if act else None

    return asyncio.run(filled())


def say(command: str, file: Path, *arguments: str) -> str:
    result = CliRunner().invoke(cli, ["live", command, str(file), *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_status_shows_the_lanes_and_why(file: Path) -> None:
    async def served(shop: Shop) -> None:
        for _ in range(40):
            await shop.session(0.75)
        shop.now += 10
        await shop.decided()

    fill(file, 0, 4, act=served)
    said = say("status", file)
    assert "version 4 candidate: made by 4 steps" in said
    rows = [line.split() for line in said.splitlines() if "│" in line]
    assert [row[1:6:2] for row in rows] == [["0", "serving", "50%"], ["4", "candidate", "50%"]]
    assert rows[1][7:10:2] == ["75.0%", "22"]
    assert re.fullmatch(r"-\d+ to \+\d+", " ".join(rows[1][11:14]))
    known = json.loads(say("status", file, "--json"))
    assert [event["kind"] for event in known["events"]] == ["first", "candidate"]


def test_a_candidate_is_promoted_and_rolled_back_by_hand(file: Path) -> None:
    fill(file, 0, 4)
    assert say("promote", file) == "version 4 promoted; version 4 serves\n"
    assert fill(file, act=Shop.lanes) == Lanes(serving=4, previous=0, share=0.5)
    assert say("rollback", file, "0") == "version 4 rolled back; version 0 serves\n"
    assert fill(file, act=Shop.lanes) == Lanes(serving=0, share=0.5)


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("promote", ["7"], "version 7 is no candidate; any version can be offered again"),
        ("rollback", [], "only the version that served before can be rolled back to, and none did"),
        ("rollback", ["2"], "and none did; any version can be offered again"),
    ],
)
def test_what_cannot_be_done_says_what_can(
    file: Path, command: str, arguments: list[str], said: str
) -> None:
    fill(file, 0, 4)
    with pytest.raises(ConfigError, match=said):
        say(command, file, *arguments)
    with pytest.raises(ConfigError, match=r"offer RUN_FILE FOLDER` \(0: versions/policy-0"):
        say(command, file, *arguments)


def test_before_anything_is_served_that_is_said(file: Path) -> None:
    async def opened(shop: Shop) -> None:
        await shop.store.open_run(RUN, {})

    fill(file, act=opened)
    assert say("status", file) == "No version is served yet.\n"
    with pytest.raises(ConfigError, match="no version is served yet"):
        say("promote", file)


def test_offered_weights_wait_for_the_training_half(file: Path) -> None:
    fill(file, 0)
    made = file.parent / "made"
    made.mkdir()
    with pytest.raises(ConfigError, match=r"made has no weights: no config.json"):
        say("offer", file, str(made))
    (made / "config.json").write_text("{}")
    assert "once the run's training half has copied and loaded it" in say("offer", file, str(made))
    say("offer", file, str(made))
    said = say("status", file).replace("\n", "")
    for number in (GIVEN, GIVEN + 1):
        assert f"version {number} is offered and not loaded yet: {made}" in said


def test_a_decision_that_meets_another_is_made_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(file, 0, 4)
    real, met = module.decide, []

    async def decide(*given: Any) -> None:
        if not met:
            met.append(given)
            raise Conflict("somebody was faster")
        await real(*given)

    monkeypatch.setattr(module, "decide", decide)
    assert say("promote", file) == "version 4 promoted; version 4 serves\n"
