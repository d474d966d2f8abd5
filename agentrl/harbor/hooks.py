"""Joins a run of Harbor tasks whose agent is a harness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.runners.harnesses.preset import load_preset
from agentrl.runners.hooks import RunnerHooks


def join(config: Any, root: Path) -> RunnerHooks | None:
    """What gives roles to the calls that are not the agent's own. Raises ConfigError for an unknown
    harness."""
    name = config.environment_options.get("harness", "")
    if not name or not config.environment.startswith("harbor:"):
        return None
    hooks = RunnerHooks()
    hooks.role_rules = load_preset(name, root).match
    return hooks
