"""Drafts a version of a data set, without duplicate and contradictory items.

Pairs of rollouts are chosen in a group, for stored groups and for those of a training step. A run's
version of its data set is pinned from its first start to its end.
"""

from __future__ import annotations

from msgspec.structs import replace

# Imported first, because the schema imports the table.
from agentrl.core.config import RunConfig, from_store

# isort: split
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import combinations
from math import isnan
from typing import Any, Literal

from agentrl.core.errors import ConfigError
from agentrl.core.types import Image, Transition
from agentrl.store.base import Store
from agentrl.store.records import Dataset, Item, Kind, Side, digest_of

TRAIN, TEST = "train", "test"  # splits of a data set


async def pin_dataset(store: Store, config: RunConfig) -> RunConfig:
    """Settings with a fixed version of the data set: the version of a started run, or the newest.
    Raises ConfigError for an unknown data set or version."""
    data = config.data
    if not data.name:
        return config
    versions = [row.version for row in await store.datasets(data.set_name) if row.digest]
    state = await store.run(config.name)
    if not data.version and state is not None and state.step:
        data = from_store(state.config).data
    version = data.version or max(versions, default=0)
    if version not in versions:
        complete = ", ".join(map(str, versions)) or "none"
        raise ConfigError(
            f"data.name = {data.name!r}: the store {config.store} has no such version (complete "
            f"ones: {complete}); make one with `agentrl data mine` or `import`"
        )
    pinned = replace(data, name=f"{data.set_name}@{version}")
    return replace(config, data=pinned)


How = Literal["extremes", "all", "best-of"]
MIN_DIFFERENCE = 1e-9  # smaller differences count as ties


def choose_pairs(
    values: Sequence[float], how: How, least: float, per_group: int, seed: str
) -> list[tuple[int, int]]:
    """Indices (better, worse) of pairs whose values differ by at least `least`, and by more than 0.

    extremes: the best and the worst. all: all pairs, the largest gap first. best-of: the best and a
    random other one, drawn with `seed`. per_group: maximum number of pairs; 0: all. NaN values are
    excluded."""
    scored = [i for i, value in enumerate(values) if not isnan(value)]
    order = sorted(scored, key=lambda i: -values[i])  # ties in order of index
    if len(order) < 2:
        return []
    candidates = [(order[0], order[-1])]
    if how == "all":
        candidates = sorted(combinations(order, 2), key=lambda two: values[two[1]] - values[two[0]])
    elif how == "best-of":
        candidates = [(order[0], random.Random(seed).choice(order[1:]))]
    pairs = [(a, b) for a, b in candidates if values[a] - values[b] >= max(least, MIN_DIFFERENCE)]
    return pairs[: per_group or None]


ROWS_PER_CALL = 500  # completions or items per call to the store
IMAGE_BYTES = 2**24  # bytes of images per write to the store, unless a single image is larger
Conflicts = Literal["drop", "keep"]


@dataclass(slots=True)
class Draft:
    """Collects the items of one version. `counts`: kept items by kind, others by reason."""

    store: Store
    name: str
    version: int
    test: float  # held-out fraction of the prompts
    conflicts: Conflicts = "drop"
    counts: Counter[str] = field(default_factory=Counter)
    items: dict[str, Item] = field(default_factory=dict)  # by id
    sides: list[Side] = field(default_factory=list)  # not stored yet
    known: set[str] = field(default_factory=set)
    images: dict[str, Image] = field(default_factory=dict)  # not stored yet, by digest

    def side(
        self, transitions: Sequence[Transition], rollout: str | None = None, **part: Any
    ) -> str:
        """Add a completion and return its digest. Its calls are copied, or are `part` of a
        `rollout`."""
        digest = digest_of(transitions)
        if digest not in self.known:
            self.known.add(digest)
            copied = list(transitions) if rollout is None else []
            self.sides.append(Side(digest=digest, rollout=rollout, own=copied, **part))
        return digest

    def add(self, kind: Kind, prompt: bytes, chosen: str, **fields: Any) -> None:
        """Add an item. A hash of the prompt decides its split."""
        if chosen == fields.get("rejected"):
            self.counts["identical completions"] += 1
            return
        drawn = int.from_bytes(blake2b(prompt, digest_size=4).digest()) / 2**32
        split = TEST if drawn < self.test else TRAIN
        item = Item(position=0, kind=kind, chosen=chosen, split=split, **fields)
        self.counts["found before"] += item.id in self.items
        self.items.setdefault(item.id, item)

    async def flush(self, *, least: int = ROWS_PER_CALL) -> None:
        """Store the collected completions if there are at least `least`, or large images."""
        if len(self.sides) >= least or self._large():
            await self.store.put_images("", list(self.images.values()))
            self.images.clear()
            for first in range(0, len(self.sides), ROWS_PER_CALL):
                part = self.sides[first : first + ROWS_PER_CALL]
                await self.store.add_items(self.name, self.version, [], part)
            self.sides.clear()

    def _large(self) -> bool:
        return sum(len(image.body) for image in self.images.values()) >= IMAGE_BYTES

    async def commit(self) -> Dataset:
        """Store the items, except contradictory ones, and complete the version."""
        pairs = {(item.chosen, item.rejected) for item in self.items.values()}
        consistent = list(self.items.values())
        if self.conflicts == "drop":
            consistent = [item for item in consistent if (item.rejected, item.chosen) not in pairs]
        if dropped := len(self.items) - len(consistent):
            self.counts["contradictions"] += dropped
        self.counts.update(f"{item.kind} ({item.split})" for item in consistent)
        await self.flush(least=1)
        for first in range(0, len(consistent), ROWS_PER_CALL):
            part = enumerate(consistent[first : first + ROWS_PER_CALL], first)
            numbered = [replace(item, position=position) for position, item in part]
            await self.store.add_items(self.name, self.version, numbered, [])
        return await self.store.commit_dataset(self.name, self.version)
