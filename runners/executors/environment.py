"""The environment in which agents of Python create their model clients."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from urllib.request import getproxies

from msgspec.structs import replace

from agentrl.base.model_clients import KEY, model_variables
from agentrl.types import Failure

LOCAL = "127.0.0.1,localhost"
VARIABLE = re.compile(r"""\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b|(?<=['"])[A-Z][A-Z0-9]+(?=['"])""")
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


def withheld(text: str, given: Mapping[str, str]) -> str:
    """What to add to an error message of a process that has the variables `given`, if its text
    names variables that only the runner has; else nothing."""
    lost = {name for name in VARIABLE.findall(text) if name in os.environ and name not in given}
    names = sorted(name for name in lost if not name.startswith("AGENTRL_"))
    if not names:
        return ""
    return (
        f"; the runner has {', '.join(names)} and the agent's process does not: set"
        f" agent.pass_env = {json.dumps(names)}"
    )


def explained(failure: Failure, given: Mapping[str, str]) -> Failure:
    """The failure of an agent whose process has the variables `given`."""
    return replace(failure, message=failure.message + withheld(failure.message, given))


def matching(environment: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Return the variables whose names match any of the patterns."""
    wanted = tuple(patterns)
    return {k: v for k, v in environment.items() if any(fnmatchcase(k, p) for p in wanted)}
