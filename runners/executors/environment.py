"""What an agent finds in its environment: the gateway where it expects the model's API."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from urllib.request import getproxies

# Frameworks send traces of their own to api.openai.com and telemetry.crewai.com by default.
NO_TELEMETRY = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "CREWAI_DISABLE_TELEMETRY": "true"}
LOCAL = "127.0.0.1,localhost"
KEY = "agentrl"  # in the place of the user's own, which are of no use at the gateway
# What clients of models find their credentials in. Those of tools are the agent's own business.
KEYS = (
    *("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    *("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN", "AZURE_API_KEY", "AZURE_AI_API_KEY"),
    *("GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GENERATIVE_AI_API_KEY", "MISTRAL_API_KEY"),
    *("GROQ_API_KEY", "TOGETHER_API_KEY", "TOGETHERAI_API_KEY", "FIREWORKS_API_KEY"),
    *("DEEPSEEK_API_KEY", "OPENROUTER_API_KEY", "XAI_API_KEY", "COHERE_API_KEY", "CO_API_KEY"),
    *("PERPLEXITY_API_KEY", "PERPLEXITYAI_API_KEY", "CEREBRAS_API_KEY", "MOONSHOT_API_KEY"),
    *("DASHSCOPE_API_KEY", "NVIDIA_API_KEY", "AWS_BEARER_TOKEN_BEDROCK", "LITELLM_API_KEY"),
)
MODEL = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "NO_PROXY", "no_proxy"),
    *(*KEYS, *NO_TELEMETRY),
)  # what `environment` sets
ACCOUNT = ("OPENAI_ORG_ID", "OPENAI_ORGANIZATION", "OPENAI_PROJECT_ID")  # sent along with a key


@contextmanager
def environment(base_url: str, keep: Sequence[str] = ()) -> Iterator[None]:
    """Point clients that are built inside the block at `base_url`, which ends in /v1, and put the
    user's own keys for models out of their reach, save for variables that match a pattern of
    `keep`; restores what was there.

    Clients read these when they are built, usually while the agent's module is imported, so the
    block begins before that. One that finds its way to another API has no key to spend there."""
    changed: dict[str, str | None] = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": KEY,
        **NO_TELEMETRY,
    }
    present = os.environ.keys()
    changed |= {name: KEY for name in KEYS if name in present and not _kept(name, keep)}
    changed |= {name: None for name in ACCOUNT if name in present and not _kept(name, keep)}
    if getproxies().keys() - {"no"}:  # the way to the gateway is never through one
        for name in ("NO_PROXY", "no_proxy"):
            known = os.environ.get(name)
            changed[name] = f"{known},{LOCAL}" if known else LOCAL
    before = {name: os.environ.get(name) for name in changed}
    _set(changed)
    try:
        yield
    finally:
        _set(before)


def _kept(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
