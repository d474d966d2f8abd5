"""The rewards that hidden tests wrote to files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

REWARD = "reward"  # the name of the outcome in Harbor's files


class NoRewardError(ValueError):
    """The text is no reward. The message continues "the tests wrote ..."."""


def read_rewards(texts: Mapping[str, str]) -> dict[str, float]:
    """The rewards by name, from the contents of `reward.json` (names -> numbers) or else
    `reward.txt` (a number, the reward "reward"). Raises NoRewardError."""
    if "reward.json" in texts:
        return _by_name(texts["reward.json"])
    if "reward.txt" in texts:
        return {REWARD: _number(texts["reward.txt"].strip(), "reward.txt")}
    raise NoRewardError("no reward to reward.json or reward.txt")


def with_outcome(rewards: Mapping[str, float], name: str = REWARD) -> dict[str, float]:
    """The rewards with the one of this name, or the only one, as `outcome`. Raises NoRewardError
    if it is not clear which one that is."""
    if name not in rewards and len(rewards) > 1:
        raise NoRewardError(
            f"several rewards to reward.json ({', '.join(rewards)}), and none is named {name!r};"
            " name the rollout's by the option `outcome`"
        )
    own = name if name in rewards else next(iter(rewards))
    return {"outcome": rewards[own]} | {k: v for k, v in rewards.items() if k != own}


def _by_name(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except ValueError:
        raise NoRewardError(f"no JSON to reward.json: {text.strip()[:80]!r}") from None
    if not isinstance(found, dict) or not found:
        raise NoRewardError(f"no names with numbers to reward.json: {text.strip()[:80]!r}")
    return {name: _number(value, f"reward.json as {name!r}") for name, value in found.items()}


def _number(value: object, where: str) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (isinstance(value, str) and where != "reward.txt"):
        raise NoRewardError(f"{value!r:.80} to {where}, which is no finite number")
    return number
