"""Records of a prompt search: candidates (sets of texts) and calls to the reflector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

from agentrl.types import PromptText, Record


class Candidate(Record, frozen=True):
    """One set of texts of a prompt search. Rollouts with its `id` give its score."""

    id: str  # a digest of the texts, see `candidate_id`
    run: str
    step: int  # of the search or the training run that created it
    parents: list[str]
    state: Literal["proposed", "rejected", "accepted", "chosen"]
    texts: list[PromptText]
    reflection: str | None = None  # id of the reflector call that wrote its newest text


class Reflection(Record, frozen=True):
    """A call to the reflector of a prompt search."""

    id: str
    run: str
    step: int
    question: str
    answer: str
    prompt_tokens: int = 0  # as counted by its server
    completion_tokens: int = 0
    seconds: float = 0.0


def candidate_id(texts: Sequence[PromptText]) -> str:
    """A digest of the texts: equal for equal texts."""
    return blake2b(msgspec.json.encode(texts), digest_size=8).hexdigest()


@dataclass(slots=True)
class CandidateInUse:
    """The candidate of newly requested rollouts; None: the agent's own texts."""

    id: str | None = None
