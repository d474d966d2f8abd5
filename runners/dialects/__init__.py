"""The model APIs that agents may call. A new API is a module here and an entry in `DIALECTS`."""

from agentrl.runners.dialects import google, messages, responses
from agentrl.runners.dialects.base import CHAT, TEXT, Dialect, Translation, UntranslatableError

DIALECTS = (CHAT, TEXT, responses.DIALECT, messages.DIALECT)

__all__ = ["DIALECTS", "Dialect", "Translation", "UntranslatableError", "of"]


def of(path: str, *, anthropic: bool = False) -> Dialect:
    """Return the dialect that answers requests for `path`, a default for unknown paths."""
    if "/models/" in path and ":" in path:
        return google.DIALECT
    for dialect in DIALECTS[::-1]:  # "completions" ends "chat/completions" too
        if f"/v1/{dialect.route}" in path:
            return dialect
    return messages.DIALECT if anthropic else CHAT
