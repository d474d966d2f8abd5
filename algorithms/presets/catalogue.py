"""Algorithms by name: each is a few answers to the five questions of `objective`.

`make("grpo+tis", {"clip_high": 0.28, "tis_cap": 3.0})` builds one: a preset, then any modifiers,
with the keyword options of all of them.
"""

from __future__ import annotations

# Importing them registers what they define.
from agentrl.algorithms.presets import corrections, process, rollouts, teams, trees, turns  # noqa: F401
from agentrl.algorithms.presets.registry import make, modifiers, presets

__all__ = ["make", "modifiers", "presets"]
