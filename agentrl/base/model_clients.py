"""The variables from which model clients read address and key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Frameworks send traces of their own to api.openai.com and telemetry.crewai.com by default.
NO_TELEMETRY = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "CREWAI_DISABLE_TELEMETRY": "true"}
KEY = "agentrl"  # replaces the user's own keys, which the gateway does not use
NOWHERE = "http://127.0.0.1:9/v1"  # nobody listens at the port `discard`


def model_variables(gateway: str, key: str) -> dict[str, str]:
    """Variables from which model clients read base URL and key; `gateway` ends in /v1."""
    return {
        "OPENAI_BASE_URL": gateway,
        "OPENAI_API_BASE": gateway,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": gateway.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        **NO_TELEMETRY,
    }


@contextmanager
def placeholders() -> Iterator[bool]:
    """Let a user's file create its model clients on import where there is no gateway, such as a
    file with agent, tasks and verifier in a process that needs the tasks. A key of the user's, and
    the address that goes with it, stays. Yields whether a variable was missing."""
    own = [name for name in ("OPENAI", "ANTHROPIC") if f"{name}_API_KEY" in os.environ]
    given = {
        name: value
        for name, value in model_variables(NOWHERE, KEY).items()
        if name not in os.environ and not name.startswith(tuple(own))
    }
    os.environ |= given
    try:
        yield bool(given)
    finally:
        for name in given:
            os.environ.pop(name, None)
