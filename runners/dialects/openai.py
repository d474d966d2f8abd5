"""Chat completions and completions: what policy servers speak themselves."""

from __future__ import annotations

from agentrl.runners.dialects.base import Body, Dialect

TYPES = {429: "rate_limit_error"}


def error(status: int, code: str, message: str) -> Body:
    """https://platform.openai.com/docs/guides/error-codes"""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


CHAT = Dialect("chat/completions", "chat/completions", error)
TEXT = Dialect("completions", "completions", error)
