"""The features of a run's gateway."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.base.parts import installed_plugins
from agentrl.config import RoleRule, RunConfig
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.role_rules import RoleRules
from agentrl.store.base import Store


def run_features(store: Store, config: RunConfig, rules: Sequence[RoleRule] = ()) -> list[Feature]:
    """Return them in their order: what parts change in a call depends on its role."""
    parts = (point.load()(store, config) for point in installed_plugins("gateway"))
    return [RoleRules(rules), *filter(None, parts)]
