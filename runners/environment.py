"""What an agent finds in its environment: the gateway where it expects the model's API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import getproxies

MODEL = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_AGENTS_DISABLE_TRACING"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "NO_PROXY", "no_proxy"),
)  # what `environment` sets
LOCAL = "127.0.0.1,localhost"


@contextmanager
def environment(base_url: str) -> Iterator[None]:
    """Point clients that are built inside the block at `base_url`, which ends in /v1; restores what
    was there.

    Clients read these when they are built, usually while the agent's module is imported."""
    changed = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": "agentrl",  # never the user's own key: it is of no use here
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": "agentrl",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # that SDK sends its traces to api.openai.com
    }
    if getproxies().keys() - {"no"}:  # the way to the gateway is never through one
        for name in ("NO_PROXY", "no_proxy"):
            present = os.environ.get(name)
            changed[name] = f"{present},{LOCAL}" if present else LOCAL
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
