"""Whether a customer is content with an answer, by what the customer says next."""

from __future__ import annotations

from wording import COMPLAINTS, THANKS


def content(next: list[dict[str, str]]) -> float | None:
    """1 for thanks, 0 for a complaint; None for a tool's result, or anything else."""
    said = " ".join(message["content"] for message in next if message["role"] == "user")
    if said.startswith(COMPLAINTS):
        return 0.0
    return 1.0 if said.startswith(THANKS) else None
