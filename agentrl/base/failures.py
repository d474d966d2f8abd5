"""One-sentence summaries of failed rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.types import Failure

LONGEST_MESSAGE = 400  # characters of a message


def commonest_failure(failures: Sequence[Failure], total: int) -> str:
    """A sentence about the most frequent kind in `failures`: how many of `total` rollouts failed
    this way, and their most frequent message."""
    ((kind, count),) = Counter(failure.kind for failure in failures).most_common(1)
    messages = Counter(failure.message for failure in failures if failure.kind is kind)
    ((message, _),) = messages.most_common(1)
    return f"{count} of {total} failed by {kind}: {one_line(message)}"


def one_line(message: str) -> str:
    """A message on one line, shortened to LONGEST_MESSAGE characters."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} ..."
