"""The table [sessions] of the run file."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from agentrl.config.base import Seconds, Section


class SessionsConfig(Section, frozen=True):
    """How `agentrl gateway serve` records the sessions of a deployed agent."""

    header: str = "x-session-id"  # request header with the id of the session
    # Session of a request without the header: the conversation that it continues, or one per key.
    by: Literal["conversation", "key"] = "conversation"
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # fraction of sessions to record
    idle: Seconds = 1800.0  # Seconds without a call after which a session ends.
    timeout: Seconds = 600.0  # Seconds of one call, at most.
    # Regular expressions. Matches are stored as [redacted], and such calls without their tokens.
    redact: list[str] = []
    # Environment variable with the API keys that callers may send as a bearer token or x-api-key,
    # separated by spaces. Empty: no keys, which is allowed only on this machine's loopback address.
    key_env: str = ""

    def __post_init__(self) -> None:
        for pattern in self.redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"redact has {pattern!r}: {error}") from None


def sessions_of(config: Any) -> SessionsConfig:
    settings: SessionsConfig = config.sessions
    return settings
