"""The secret of a live run, and what is made with it: hashes of users and tokens of sessions."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

from agentrl.base.access import read_key
from agentrl.config import RunConfig
from agentrl.live.table import live_of
from agentrl.store.base import Store

SECRETS, KEY = "live-secret", "secret"  # kind and key of the document
TOKEN = "x-agentrl-feedback-token"  # header of responses, and of feedback


async def secret_of(store: Store, config: RunConfig) -> bytes:
    """The secret in the variable `live.people.secret_env`, else the store's, made at the first
    call. Raises ConfigError if the variable is not set, NotFound for an unknown run."""
    variable = live_of(config).people.secret_env
    if given := read_key(variable, "live.people.secret_env", "the run's"):
        return given.encode()
    if KEY not in await store.documents(config.name, SECRETS):
        # Of two processes that make one, the first counts.
        await store.put_documents(config.name, SECRETS, {KEY: secrets.token_hex(32)})
    return str((await store.documents(config.name, SECRETS))[KEY]).encode()


def user_id(secret: bytes, user: str) -> str:
    """The name of a user in the store; empty for nobody. It cannot be guessed without the secret,
    as names of users can."""
    return _digest(secret, "user", user)[:16] if user else ""


def token_of(secret: bytes, session: str) -> str:
    """The token that feedback on a session needs."""
    return _digest(secret, "feedback", session)[:32]


def is_token(secret: bytes, session: str, given: str) -> bool:
    return hmac.compare_digest(token_of(secret, session).encode(), given.encode(errors="replace"))


def _digest(secret: bytes, purpose: str, text: str) -> str:
    return hmac.new(secret, f"{purpose}:{text}".encode(errors="replace"), sha256).hexdigest()
