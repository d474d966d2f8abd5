"""The settings of the part: `policy.vision`, and the table [images] with limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from agentrl.config.base import Count, Section, optional
from agentrl.types import POLICY

Vision = Annotated[
    Literal["", "frozen", "trained"],
    msgspec.Meta(
        description="whether the policy sees images in messages, and the part of the model that"
        " sees them, its vision tower, is trained; default: a call with an image is refused"
    ),
]


class ImagesConfig(Section, frozen=True):
    """Limits of the images in messages; a call beyond them is refused."""

    plays: ClassVar[bool] = True
    max_per_call: Count = 100  # images in the messages of one call
    max_bytes: Count = 20_000_000  # bytes of an image's file
    # Pixels of an image: what decoding it costs, however small its file is.
    max_pixels: Count = 33_554_432

    def problems(self, config: Any) -> Iterator[str]:
        if self != ImagesConfig() and not (seeing_policies(config) or config.upstreams):
            yield "[images] has no effect, as no policy sees images; set policy.vision"


def images_of(config: Any) -> ImagesConfig:
    found = optional(config, "images")
    return found if isinstance(found, ImagesConfig) else ImagesConfig()


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
