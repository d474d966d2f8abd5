"""The game of `docs/how-to/self-play.md` trains as it stands there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.types import Purpose, Rollout
from agentrl.store import open_store
from tests import warm

PAGE = Path(__file__).parents[3] / "docs/how-to/self-play.md"
(GAME,) = re.findall(r"```python\n# undercut/game.py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
(SETTINGS,) = re.findall(
    r"```toml\n# undercut/run.toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL
)


@pytest.mark.parametrize(
    ("first", "second", "won"),
    [
        (9, 1, 1.0),
        (1, 9, -1.0),
        (8, 9, 1.0),
        (9, 8, -1.0),
        (5, 5, 0.0),
        (0, 1, -1.0),
        (1, 0, 1.0),
        (0, 0, 0.0),
    ],  # an illegal move loses
)
def test_who_wins(first: int, second: int, won: float) -> None:
    names: dict[str, Any] = {}
    exec(GAME, names)
    rewards = names["verify"]({"player_0": first, "player_1": second})
    assert [(row.target, row.value) for row in rewards] == [("player_0", won), ("player_1", -won)]


def test_each_seat_is_a_role_with_its_reward(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    text = SETTINGS.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model_dir))
    (tmp_path / "run.toml").write_text(text)
    few = ["steps=2", "algorithm.groups=2", "algorithm.group_size=2", "sampling.max_tokens=4"]
    result = warm.run("-m", "agentrl", "train", "run.toml", *few, cwd=tmp_path)
    assert result.returncode == 0, result.stderr

    async def read() -> list[Rollout]:
        url = f"sqlite:///{tmp_path / 'runs/undercut/store.db'}"
        async with open_store(url, readonly=True) as store:
            rows = await store.rollouts("undercut", purpose=Purpose.TRAIN)
            for row in rows:
                trace = await store.trace(row.id)
                assert trace is not None
                roles = [call.role for call in trace.transitions]
                assert roles == ["player_0", "player_1"]
            return rows

    rows = asyncio.run(read())
    assert len(rows) == 8
    for row in rows:
        assert {reward.target for reward in row.rewards} == {"player_0", "player_1"}
        assert sum(reward.value for reward in row.rewards) == 0
