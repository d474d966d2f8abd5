"""The model's own forward pass, one call at a time: slow, and right for every decoder.

For models that the engine cannot compute in batches (see `proof`). `cached` keeps the model's own
cache for each call; without one, each token costs a pass over all tokens before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.engines.embedded.kv_cache import GenerationRequest, RowTable
from agentrl.algorithms.engines.embedded.sampler import Ints
from agentrl.algorithms.model.load import Model
from agentrl.errors import PolicyError

# What classes call their cache: transformers 5.24 has renamed the first two.
CACHES = ("cache", "past_key_values", "cache_params", "state")


class PlainForward:
    """Logits of a model after each running row's last token. Raises PolicyError if the model has no
    cache to keep."""

    def __init__(self, model: Model, *, cached: bool) -> None:
        names = inspect.signature(model.forward).parameters
        self.model = model
        self.cache_name = next((name for name in CACHES if name in names), "") if cached else ""
        if cached and not self.cached:
            raise PolicyError("its forward pass takes no cache")
        # Others compute logits for the whole prompt.
        self.keep: dict[str, int] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self.placed = "cache_position" in names  # some classes want it, before transformers 5.4
        self.caches: dict[GenerationRequest, tuple[int, Any]] = {}  # tokens in it, and the cache

    @property
    def cached(self) -> bool:
        return bool(self.cache_name)

    def logits(
        self, rows: RowTable, adapted: Callable[[Ints], AbstractContextManager[None]]
    ) -> Tensor:
        """[n, V]. adapted: context that applies to each token the adapter of its policy."""
        running = rows.calls
        kept = {call: cache for call, cache in self.caches.items() if call in running}
        self.caches, found = kept, []
        for row, call in enumerate(running):
            known = int(rows.known[row])
            # A row whose keys were dropped has older weights in its cache.
            before, cache = self.caches.get(call, (0, None)) if rows.length[row] else (0, None)
            tokens = torch.from_numpy(rows.tokens[row, before:known].astype(np.int64))[None]
            with adapted(np.full(known - before, rows.policy[row])):
                output, cache = self._call(tokens, cache, before)
            found.append(output[0, -1])
            if self.cached:
                self.caches[call] = known, cache
            rows.length[row] = known
        return torch.stack(found)

    def _call(self, tokens: Tensor, cache: Any, before: int) -> tuple[Tensor, Any]:
        device = next(self.model.parameters()).device
        state = {self.cache_name: cache} if cache is not None else {}
        if state and self.placed:
            state["cache_position"] = torch.arange(before, before + tokens.shape[1], device=device)
        output = self.model(
            input_ids=tokens.to(device), use_cache=self.cached, **state, **self.keep
        )
        return output.logits, getattr(output, self.cache_name) if self.cached else None
