"""What a live run refuses to be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load
from agentrl.errors import ConfigError

RUN = """
[policy]
model = "model"
[algorithm]
preset = "reinforce+tis"
"""


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("algorithm.branching.kind=mc", "nobody can play the rest of a live session"),
        ("sessions.by=key", "all that a key does"),
        ("live.share=0", "between 0 and 1"),
        ("tasks.train=tasks.jsonl", "keep only heldout and columns"),
    ],
)
def test_settings_without_a_meaning_for_sessions_are_refused(
    tmp_path: Path, setting: str, why: str
) -> None:
    (tmp_path / "shop.toml").write_text(RUN)
    load(tmp_path / "shop.toml", ["live.running=true"])
    with pytest.raises(ConfigError, match=why):
        load(tmp_path / "shop.toml", ["live.running=true", setting])
