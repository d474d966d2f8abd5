"""The APIs that agents speak. A new one is a module here and a line in `DIALECTS`."""

from agentrl.runners.dialects import google, messages, responses
from agentrl.runners.dialects.base import CHAT, TEXT, Dialect, Translation, UntranslatableError

DIALECTS = (CHAT, TEXT, responses.DIALECT, messages.DIALECT)

__all__ = ["DIALECTS", "Dialect", "Translation", "UntranslatableError", "of"]


def of(path: str, *, anthropic: bool = False) -> Dialect:
    """The dialect in which a request for `path` is answered, unknown paths included."""
    if "/models/" in path and ":" in path:
        return google.DIALECT
    for dialect in DIALECTS[::-1]:  # "completions" ends "chat/completions" too
        if f"/v1/{dialect.route}" in path:
            return dialect
    return messages.DIALECT if anthropic else CHAT
