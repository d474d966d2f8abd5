"""The features of a run's gateway."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config import RoleRule, RunConfig
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.images import StoredImages
from agentrl.runners.gateway.prompts import CandidatePrompts
from agentrl.runners.gateway.replays import Replays
from agentrl.runners.gateway.role_rules import RoleRules
from agentrl.runners.gateway.templates import ChatTemplates
from agentrl.store.base import Store


def run_features(store: Store, config: RunConfig, rules: Sequence[RoleRule] = ()) -> list[Feature]:
    """Return them in their order: what the others change in a call depends on its role."""
    adapts = config.policy.unsupported_roles == "adapt"
    return [
        RoleRules(rules),
        CandidatePrompts(),
        Replays(store),
        *([ChatTemplates()] if adapts else []),
        StoredImages(store, config),
    ]
