"""The environment in which agents of Python create their model clients."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from urllib.request import getproxies

# Frameworks send traces of their own to api.openai.com and telemetry.crewai.com by default.
NO_TELEMETRY = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "CREWAI_DISABLE_TELEMETRY": "true"}
LOCAL = "127.0.0.1,localhost"
KEY = "agentrl"  # replaces the user's own keys, which the gateway does not use
# Credentials that model clients read. The agent keeps credentials of tools.
KEYS = (
    *("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    *("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN", "AZURE_API_KEY", "AZURE_AI_API_KEY"),
    *("GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GENERATIVE_AI_API_KEY", "MISTRAL_API_KEY"),
    *("GROQ_API_KEY", "TOGETHER_API_KEY", "TOGETHERAI_API_KEY", "FIREWORKS_API_KEY"),
    *("DEEPSEEK_API_KEY", "OPENROUTER_API_KEY", "XAI_API_KEY", "COHERE_API_KEY", "CO_API_KEY"),
    *("PERPLEXITY_API_KEY", "PERPLEXITYAI_API_KEY", "CEREBRAS_API_KEY", "MOONSHOT_API_KEY"),
    *("DASHSCOPE_API_KEY", "NVIDIA_API_KEY", "AWS_BEARER_TOKEN_BEDROCK", "LITELLM_API_KEY"),
)
ACCOUNT = ("OPENAI_ORG_ID", "OPENAI_ORGANIZATION", "OPENAI_PROJECT_ID")  # sent along with a key


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
def environment(base_url: str, keep: Sequence[str] = ()) -> Iterator[None]:
    """Point model clients that are created inside the block at `base_url`, which ends in /v1, and
    replace the user's model API keys, except variables that match a pattern of `keep`. Restores the
    environment at the end.

    Clients read these variables when they are created, usually on import of the agent's module, so
    enter the block before that. A client that calls another API finds no valid key."""
    changed: dict[str, str | None] = {**model_variables(base_url, KEY)}
    given = os.environ.keys() - matching(os.environ, keep).keys()
    changed |= {name: KEY for name in KEYS if name in given}
    changed |= {name: None for name in ACCOUNT if name in given}
    if getproxies().keys() - {"no"}:  # the gateway is never reached through a proxy
        for name in ("NO_PROXY", "no_proxy"):
            known = os.environ.get(name)
            changed[name] = f"{known},{LOCAL}" if known else LOCAL
    before = {name: os.environ.get(name) for name in changed}
    _set(changed)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def matching(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Return the variables whose names match any of the patterns."""
    wanted = tuple(patterns)
    return {k: v for k, v in environment.items() if any(fnmatchcase(k, p) for p in wanted)}
