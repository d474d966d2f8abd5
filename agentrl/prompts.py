"""The nouns of a prompt search: the texts that were tried, and what a reflector said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

from agentrl.types import PromptText, Record


class Candidate(Record, frozen=True):
    """The texts of a prompt search at one point. The rollouts that have its `id` score it."""

    id: str  # of its texts, see `candidate_id`
    run: str
    step: int  # the step of the search, or of the training run, that made it
    parents: list[str]
    state: Literal["proposed", "rejected", "accepted", "chosen"]
    texts: list[PromptText]
    reflection: str | None = None  # the call to the reflector that its newest text is from


class Reflection(Record, frozen=True):
    """A call of a prompt search to its reflector."""

    id: str
    run: str
    step: int
    question: str
    answer: str
    prompt_tokens: int = 0  # as its server counts them
    completion_tokens: int = 0
    seconds: float = 0.0


def candidate_id(texts: Sequence[PromptText]) -> str:
    """The same for the same texts."""
    return blake2b(msgspec.json.encode(texts), digest_size=8).hexdigest()


@dataclass(slots=True)
class CandidateInUse:
    """Whose texts the rollouts that are asked for now read; None: the agent's own."""

    id: str | None = None
