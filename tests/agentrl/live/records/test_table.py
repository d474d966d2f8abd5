"""What a live run refuses to be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.config import load
from agentrl.core.errors import ConfigError

RUN = """
[policy]
model = "model"
[algorithm]
preset = "reinforce+tis"
"""


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("algorithm.branching.kind=mc", "the rest of a live session cannot be replayed"),
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
