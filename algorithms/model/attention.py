"""One attention function for the models of this package, chosen by what a forward pass carries.

The policy server feeds rows of unequal length against cached keys, the learner feeds the branches
of a forest, and both use one model object. So one function is registered with transformers under
`NAME`; a forward pass with `plan=` attends as its plan says, one without is ordinary SDPA.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "agentrl"
UNUSED = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # as mask beside a plan: four axes, none is made


class AttentionPlan(Protocol):
    """How the tokens of one forward pass attend, in every layer."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """[1, heads, N, dim] queries -> [1, N, heads, value dim]. window: keys further back than
        this many positions, itself included, are not seen (None: all are)."""
        ...


def incompatibility(model: torch.nn.Module) -> str | None:
    """What about a model a plan would change, as the end of a sentence that starts with its name;
    None: nothing, so that it can be installed."""
    network: Any = model
    config = network.config.get_text_config()
    if not (network._supports_attention_backend and network._supports_sdpa):
        return "has an attention of its own"
    layers = set(getattr(config, "layer_types", None) or ())
    if layers - {"full_attention", "sliding_attention"}:
        return f"has layers of type {min(layers - {'full_attention', 'sliding_attention'})!r}"
    if getattr(config, "attn_logit_softcapping", None):
        return "caps its attention scores"
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        # positions of every call would move with the longest one
        if each.get("rope_type") in ("dynamic", "longrope"):
            return f"has {each['rope_type']!r} rotary positions"
    return None


def install(model: torch.nn.Module) -> None:
    """Route the attention of a model without an `incompatibility` through `attention`."""
    network: Any = model
    if network.config._attn_implementation != NAME:
        network.set_attn_implementation(NAME)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: [B, heads, N, dim] queries -> [B, N, heads, value dim]."""
    if plan is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    return plan.attend(query, key, value, scaling, sliding_window), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
