"""Records of the store beyond those of `agentrl.core.types`.

Rows of lists, results of `stats` and `prune`, data sets.

A data set has versions, each a list of items that never changes after its commit. An item refers to
one or two sides by digest. A side of a stored rollout is a reference into its trace, not a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from agentrl.core.types import (
    AttemptState,
    ErrorKind,
    Failure,
    Json,
    Purpose,
    Record,
    Reward,
    RolloutState,
    Span,
    Transition,
    float32,
    int32,
    versions_in_words,
)

Kind = Literal["pair", "label", "steps", "demonstration"]


class GroupRow(Record, frozen=True):
    """A group with ids, states and outcomes of its rollouts, in order of index; empty lists if it
    is pruned. An outcome is the rollout's reward with this name, None if missing."""

    id: str
    purpose: Purpose
    step: int  # the step that requested it
    state: str  # open, settled, claimed, trained or discarded
    trained: int | None  # the step that trained or discarded it
    rollouts: list[str]
    states: list[RolloutState]
    outcomes: list[float | None]

    @property
    def n(self) -> int:
        return len(self.rollouts)

    @property
    def failed(self) -> int:
        return self.states.count(RolloutState.FAILED)


class RolloutRow(Record, frozen=True):
    """A rollout without task, result and calls, with the rewards of its last attempt."""

    id: str
    run: str
    group: str
    index: int
    purpose: Purpose
    step: int
    state: RolloutState
    trained: int | None
    attempts: int
    attempt: str | None
    seconds: float
    error: ErrorKind | None
    rewards: list[Reward]


class Found(NamedTuple):
    """One page of a search. `cursor`: start of the next page, None at the end; `looked`: number of
    rollouts examined for this page."""

    rows: list[RolloutRow]
    cursor: str | None
    looked: int


class CallRow(Record, frozen=True):
    """A call without its texts and tokens. `parent`: position of the earlier call that it
    continues; None: it starts a conversation. Its first `shared` messages are those of `parent`,
    including the answer if the agent sent it unchanged."""

    id: str
    role: str
    policy: str
    version: int | None
    spans: list[tuple[int, int]]  # as in `Transition`
    started: float
    seconds: float
    tokens: int  # sampled
    sampled: str  # digest of the sampled tokens
    messages: int
    parent: int | None
    shared: int

    @property
    def versions(self) -> str:
        return versions_in_words(self.version, self.spans)


class AttemptRow(Record, frozen=True):
    """One attempt at a rollout with all its rows. Rows that arrived after its end, or with an old
    fence, are late: stored for inspection and never trained."""

    id: str
    fence: int
    state: AttemptState
    runner: str
    started: float  # unix seconds
    ended: float | None
    failure: Failure | None
    transitions: list[Transition]
    rewards: list[Reward]
    spans: list[Span]
    late_transitions: list[Transition]
    late_rewards: list[Reward]
    calls: int  # number of calls; `transitions` may have only the first ones
    late_calls: int


class Stats(Record, frozen=True):
    """The size of a store: `bytes` on disk, of which a vacuum would release `free`."""

    rows: dict[str, int]  # table -> rows
    bytes: int
    free: int
    cursor: int


class Pruned(Record, frozen=True):
    """Numbers of rows that a prune has removed, or would remove."""

    rollouts: int = 0
    attempts: int = 0
    transitions: int = 0
    spans: int = 0
    rewards: int = 0
    events: int = 0
    images: int = 0
    bytes: int = 0  # bytes of tokens, log-probs, messages, spans and images
    after: int | None = None  # where the next call continues; None: all is done
    share: float = 1.0  # share of the store's rollouts, by age, that were examined


class Forgotten(Record, frozen=True):
    """The result of `forget`: numbers of deleted rollouts, and of `items` by data set
    (`NAME@VERSION`). `left`: ids of rollouts that could not be deleted yet."""

    rollouts: int = 0
    left: list[str] = []
    items: dict[str, int] = {}


# -- data sets -------------------------------------------------------------------------------------


class Dataset(Record, frozen=True):
    """One version of a data set. `spec` describes how to make it again."""

    name: str
    version: int  # from 1
    spec: dict[str, Json]
    digest: str | None  # digest of the items in order; none: not committed yet
    items: int
    created: float  # unix seconds


class Side(Record, frozen=True):
    """Calls that are judged as a unit: `calls` calls (none: all) of a rollout, starting at its call
    `first`; or imported or copied calls in `own`. `digest`: see `digest_of`."""

    digest: str
    rollout: str | None = None
    first: int = 0
    calls: int | None = None
    own: list[Transition] = []


class Item(Record, frozen=True):
    """A pair of sides, or one side (`chosen`) with a label, with labels of its calls, or as a
    demonstration. Items with equal `id` are the same item, even from different sources."""

    position: int
    kind: Kind
    chosen: str  # the digest of a side
    rejected: str | None = None
    label: float | None = None  # 1: desirable, 0: undesirable
    steps: list[float | None] = []  # a label for each call of the side
    margin: float | None = None  # difference of rewards of `chosen` and `rejected`
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
    """A judge's verdict. `id` is a hash of the whole question, so no question is asked twice."""

    id: str
    subject: str  # ids of the judged rollouts or item
    judge: str
    verdict: Json
    reason: str = ""
    raw: str = ""  # the complete answer of the judge
    cost: float = 0.0  # USD
    seconds: float = 0.0


def without_tokens(call: Transition) -> Transition:
    """The call as text, which a run renders with its policy's chat template."""
    none = int32()
    fields = {"exact": False, "prompt": none, "completion": none, "logprobs": float32()}
    return replace(call, spans=[], **fields)


def digest_of(calls: Iterable[Transition]) -> str:
    """The digest of a side's content: prompt and completion tokens and images of each call, or
    messages, tools and answer of a call without token ids. Independent of the policy and the
    time."""
    state = blake2b(digest_size=16)
    for call in calls:
        if call.exact:
            parts = [call.prompt.tobytes(), call.completion.tobytes()]
            parts += [image.encode() for image in call.images]
        else:
            parts = [msgspec.json.encode((call.messages, call.tools, call.answer), order="sorted")]
        for part in parts:
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()
