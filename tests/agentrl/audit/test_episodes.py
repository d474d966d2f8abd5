"""Audits of environments that score their rollouts themselves."""

from __future__ import annotations

from pathlib import Path

from agentrl.audit.episodes import _outcome, audit_episodes
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import EnvironmentName
from agentrl.environments.runner import Played

WORLD = """
from agentrl.environments import Environment

class World(Environment):
    def __init__(self, what):
        self.what = what

    def tasks(self, split):
        first = 0 if split == "train" else 100
        return [{"id": f"{split}{n}", "input": f"Say {first + n}."} for n in range(3)]

    def solution(self, given):
        return [given.split()[1].strip(".")]

    async def run(self, given, endpoint):
        said = (await endpoint.chat([{"role": "user", "content": given}]))["content"]
        right = self.solution(given)[0]
        return float(right == said if self.what == "sound" else right in said)
"""


async def test_a_script_plays_in_place_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "audited.py").write_text(WORLD)
    for what, verdict in (("sound", "no hole found"), ("open", "exploitable")):
        named = EnvironmentName.read(f"audited.py:World:{what}", {}, tmp_path)
        report = await audit_episodes(named, RunConfig(), 60.0)
        assert report.verdict == verdict, report
        assert [one.attack for one in report.alarms] == ["the question"] * (what == "open")


GAMES = """
from agentrl.environments import Environment

class Games(Environment):
    def __init__(self, what):
        self.what = what

    def tasks(self, split):
        return [{"id": f"{split}{n}", "input": f"Round {n}."} for n in range(8)]

    async def run(self, given, endpoint):
        said = (await endpoint.chat([{"role": "user", "content": given}]))["content"]
        if self.what == "labels":
            return float(said == ("yes" if int(given[6]) % 4 < 2 else "no"))
        return 9.0
"""


async def test_luck_and_returns_without_a_scale_are_no_hole(tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(GAMES)
    for what, verdict in (("labels", "no hole found"), ("steps", "not audited")):
        named = EnvironmentName.read(f"games.py:Games:{what}", {}, tmp_path)
        report = await audit_episodes(named, RunConfig(), 60.0)
        assert (report.verdict, report.findings) == (verdict, []), report


def test_of_a_game_of_two_somebody_wins() -> None:
    won = Played(None, {}, {"first": 1.0, "second": -1.0}, [], [], "")
    both = Played(None, {}, {"first": 1.0, "second": 1.0}, [], [], "")
    assert (_outcome(won), _outcome(both)) == (0.0, 1.0)
