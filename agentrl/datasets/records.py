"""The nouns of data sets: what is learned from besides the rollouts of a run.

A data set has versions, each a list of items that never changes once it is committed. An item names
one or two sides by digest. A side of a stored rollout is a reference into its trace, not a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal

import msgspec
from msgspec.structs import replace

from agentrl.types import Json, Record, Transition, float32, int32

Kind = Literal["pair", "label", "steps", "demonstration"]


class Dataset(Record, frozen=True):
    """One version of a data set. `spec` says how it was made, so that it can be made again."""

    name: str
    version: int  # from 1
    spec: dict[str, Json]
    digest: str | None  # of its items in order; none: it is still being made
    items: int
    created: float  # unix seconds


class Side(Record, frozen=True):
    """The calls that are judged as one: `calls` calls of a rollout (none: all) from its call
    `first` on, or calls of its `own`, which were imported or copied. `digest`: see `digest_of`."""

    digest: str
    rollout: str | None = None
    first: int = 0
    calls: int | None = None
    own: list[Transition] = []


class Item(Record, frozen=True):
    """A pair of sides, or one side (`chosen`) with a label, with labels of its calls, or as a
    demonstration. Items of equal `id` are the same item, wherever they were found."""

    position: int
    kind: Kind
    chosen: str  # the digest of a side
    rejected: str | None = None
    label: float | None = None  # 1: desirable, 0: not
    steps: list[float | None] = []  # of each call of the side
    margin: float | None = None  # by how much `chosen` is better
    weight: float = 1.0
    split: str = "train"
    source: str = ""

    @property
    def sides(self) -> list[str]:
        """Digests of its sides."""
        return [self.chosen] if self.rejected is None else [self.chosen, self.rejected]

    @property
    def id(self) -> str:
        parts = (self.kind, self.chosen, self.rejected, self.label, self.steps)
        return blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


class Judgement(Record, frozen=True):
    """What a judge said. `id` is a hash of everything that it was asked, so that the same question
    is asked once."""

    id: str
    subject: str  # rollouts or item that it is about
    judge: str
    verdict: Json
    reason: str = ""
    raw: str = ""  # the judge's whole answer
    cost: float = 0.0  # USD
    seconds: float = 0.0


def without_tokens(call: Transition) -> Transition:
    """The call as text, which a run renders by the chat template of its policy."""
    none = int32()
    fields = {"exact": False, "prompt": none, "completion": none, "logprobs": float32()}
    return replace(call, spans=[], **fields)


def digest_of(calls: Iterable[Transition]) -> str:
    """Of the content of a side: the tokens before and of each call or, of a call whose tokens are
    not known, its messages, tools and answer. Who sampled them, and when, does not matter."""
    state = blake2b(digest_size=16)
    for call in calls:
        if call.exact:
            parts = [call.prompt.tobytes(), call.completion.tobytes()]
        else:
            parts = [msgspec.json.encode((call.messages, call.tools, call.answer), order="sorted")]
        for part in parts:
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()
