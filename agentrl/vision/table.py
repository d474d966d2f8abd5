"""The setting of the part in [policy]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from agentrl.config.base import optional
from agentrl.errors import ConfigError
from agentrl.types import POLICY

Vision = Annotated[
    Literal["", "frozen", "trained"],
    msgspec.Meta(
        description="whether the policy sees images in messages, and the part of the model that"
        " sees them, its vision tower, is trained; default: a call with an image is refused"
    ),
]


def vision_of(config: Any) -> str:
    """config: a policy's view of a run."""
    return str(optional(config, "policy.vision") or "")


def seeing_policies(config: Any) -> frozenset[str]:
    """The names of the policies that see images."""
    every = vision_of(config)
    if not config.policies:
        return frozenset([POLICY] if every else [])
    own = config.policies.items()
    return frozenset(name for name, member in own if optional(member, "vision") or every)


def check(config: Any) -> None:
    if names := sorted(seeing_policies(config)):
        raise ConfigError(
            f"policy.vision: the policy {names[0]!r} can learn from images, but no gateway keeps"
            " them with its calls yet; leave it out"
        )
