"""The verbs of prompt searches, a part of the protocol in `base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.prompts import Candidate, Reflection


class PromptStore(Protocol):
    """Verbs of `agentrl.store.base.Store` that a prompt search calls; everybody may read."""

    async def put_candidates(self, candidates: Sequence[Candidate]) -> None:
        """Add candidates of prompt searches; of a known one only the state changes. Raises
        NotFound for an unknown run."""

    async def add_reflection(self, reflection: Reflection) -> None:
        """Add a call to a reflector; the first of an id stays. Raises NotFound for an unknown
        run."""

    async def candidates(self, run: str) -> list[Candidate]:
        """Candidates in the order of their first `put_candidates`; [] for an unknown run."""

    async def reflections(self, run: str) -> list[Reflection]:
        """Calls to the reflector, the first first; [] for an unknown run."""
