"""What a prompt search keeps in the store: candidates, and calls to the reflector, as documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from agentrl.store.base import Store
from agentrl.store.rows import storable_text
from agentrl.types import PromptText, Record

CANDIDATE, REFLECTION = "candidate", "reflection"  # kinds of documents


class Candidate(Record, frozen=True):
    """Texts in place of the agent's own. Rollouts with its `id` give its score."""

    id: str  # a digest of the texts
    run: str
    step: int  # of the search or the training run that created it
    parents: list[str]
    state: Literal["proposed", "rejected", "accepted", "chosen"]
    texts: list[PromptText]
    reflection: str | None = None  # id of the reflection that wrote its newest text


class Reflection(Record, frozen=True):
    """A question to a model that proposes texts, and its answer."""

    id: str
    run: str
    step: int
    question: str
    answer: str
    prompt_tokens: int = 0  # as counted by its server
    completion_tokens: int = 0
    seconds: float = 0.0


async def put_candidates(store: Store, run: str, candidates: Sequence[Candidate]) -> None:
    """Add candidates of a run; of existing ones only the state is updated."""
    known = {one.id: one for one in await candidates_of(store, run)}
    new = [replace(known.get(one.id, one), state=one.state) for one in candidates]
    documents = {one.id: msgspec.to_builtins(one) for one in new}
    await store.put_documents(run, CANDIDATE, documents, replace=True)


async def candidates_of(store: Store, run: str) -> list[Candidate]:
    """The candidates of a run in the order of their creation."""
    found = await store.documents(run, CANDIDATE)
    return msgspec.convert([*found.values()], list[Candidate])


async def add_reflection(store: Store, reflection: Reflection) -> None:
    """Add a call to a reflector; of two with the same id the first is kept."""
    texts = {name: storable_text(getattr(reflection, name)) for name in ("question", "answer")}
    document = msgspec.to_builtins(replace(reflection, **texts))
    await store.put_documents(reflection.run, REFLECTION, {reflection.id: document})


async def reflections_of(store: Store, run: str) -> list[Reflection]:
    """The calls of a run to the reflector, in order."""
    found = await store.documents(run, REFLECTION)
    return msgspec.convert([*found.values()], list[Reflection])
