"""The features of a run's gateway."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.base.parts import installed_plugins
from agentrl.config import RoleRule
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.prompt_rule import ChatTemplates
from agentrl.runners.gateway.role_rules import RoleRules
from agentrl.store.base import Store


def run_features(
    store: Store, *, rules: Sequence[RoleRule] = (), as_sent: bool = False
) -> list[Feature]:
    """Return them in the order in which they change a call: what parts change depends on its role,
    and is adapted to the policy. as_sent: whether `policy.messages` is "as_sent"."""
    parts = [point.load()(store) for point in installed_plugins("gateway")]
    features: list[Feature] = [RoleRules(rules), *parts]
    return features if as_sent else [*features, ChatTemplates()]
