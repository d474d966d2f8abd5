"""People's data: the secret of a run, hashes of users, tokens of sessions, and what is deleted."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from agentrl.base.access import read_key
from agentrl.config import RunConfig
from agentrl.errors import StoreError
from agentrl.live.records.documents import told
from agentrl.live.records.marks import ended_of, known_end
from agentrl.runners.sessions.recorder import RENEWAL_INTERVAL
from agentrl.store.base import Store
from agentrl.store.records import Forgotten
from agentrl.types import SESSION, Rollout

log = logging.getLogger("agentrl.live")
SECRETS, KEY = "live-secret", "secret"  # kind and key of the document
TOKEN = "x-agentrl-feedback-token"  # header of responses, and of feedback
PAGE, AT_ONCE = 1000, 100  # sessions that are read, or deleted, at once
PATIENCE = 60.0  # seconds for a step to release sessions that are deleted
NOTICED = RENEWAL_INTERVAL + 5.0  # seconds until a gateway knows that a session was cancelled
LEAST_PAUSE, LONGEST_PAUSE = 1.0, 3600.0  # seconds between two looks for old sessions


async def secret_of(store: Store, config: RunConfig) -> bytes:
    """The secret in the variable `live.people.secret_env`, else the store's, made at the first
    call. Raises ConfigError if the variable is not set, NotFound for an unknown run."""
    variable = config.live.people.secret_env
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
    """Raises ValueError for an empty secret, by which everybody could make tokens."""
    if not secret:
        raise ValueError("the secret of the run is not known yet")
    said = f"{purpose}:{text}".encode(errors="surrogatepass")  # else two names could be the same
    return hmac.new(secret, said, sha256).hexdigest()


# -- sessions --------------------------------------------------------------------------------------


async def all_sessions(store: Store, run: str) -> AsyncIterator[Rollout]:
    """All sessions of a run, without calls, in order of their groups."""
    after = None
    while page := await store.rollouts(run, step=SESSION, after=after, limit=PAGE):
        for row in page:
            yield row
        after = page[-1].id


async def sessions_of_user(store: Store, config: RunConfig, user: str) -> list[Rollout]:
    known = user_id(await secret_of(store, config), user)
    return [row async for row in all_sessions(store, config.name) if row.task.get("user") == known]


async def export(store: Store, config: RunConfig, user: str) -> AsyncIterator[dict[str, Any]]:
    """All that is known of a user: each session with calls and rewards, then the data sets that
    have items of them."""
    rows = await sessions_of_user(store, config, user)
    for row in rows:
        calls = (await store.calls([row.id])).get(row.id, [])
        shown = ("id", "role", "version", "started", "messages", "answer")
        yield {
            "session": row.group, "task": row.task, "state": str(row.state), "trained": row.trained,
            "ended": ended_of(row),
            "calls": [{name: getattr(call, name) for name in shown} for call in calls],
            "rewards": row.rewards,
        }  # fmt: skip
    made = await store.forget([row.id for row in rows], dry_run=True)
    yield {"user": user_id(await secret_of(store, config), user), "items": made.items}


async def forget_user(
    store: Store, config: RunConfig, user: str, say: Callable[[str], None]
) -> Forgotten:
    """Delete a user's sessions with what was mined from them. Sessions in progress are ended; those
    that a step is training on are waited for, and are `left` if it takes too long."""
    rows = await sessions_of_user(store, config, user)
    running = [row.id for row in rows if not row.state.terminal]
    if running and await store.cancel(running):
        say(f"{len(running)} sessions are in progress: they are ended now")
        await asyncio.sleep(NOTICED)
    rollouts, items, left = 0, Counter[str](), [row.id for row in rows]
    deadline = time.monotonic() + PATIENCE
    while True:
        cursor = await store.cursor()
        found = [await store.forget(some) for some in _parts(left)]
        rollouts += sum(one.rollouts for one in found)
        for one in found:
            items.update(one.items)
        left, patience = [id for one in found for id in one.left], deadline - time.monotonic()
        if not left or patience <= 0:
            break
        await store.wait(cursor, timeout=patience)
    await store.vacuum()
    return Forgotten(rollouts=rollouts, left=left, items=dict(items))


def _parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    yield from (ids[i : i + AT_ONCE] for i in range(0, len(ids), AT_ONCE))


async def learned_from(store: Store, run: str, sessions: Iterable[Rollout]) -> list[int]:
    """The versions that were offered after a step that trained one of the sessions: they have
    learned from it, or may go on from a version that has."""
    steps = [row.trained for row in sessions if row.trained is not None]
    versions = (await told(store, run)).versions.values()
    return sorted(one.version for one in versions if steps and one.step > min(steps))


# -- retention -------------------------------------------------------------------------------------


async def expire(store: Store, config: RunConfig, now: float) -> int:
    """Delete sessions that ended more than `live.people.retention` seconds ago, also with what was
    mined from them; returns their number. What a step is training on stays until the next time."""
    limit = config.live.people.retention
    if limit is None:
        return 0
    old = [
        row.id
        async for row in all_sessions(store, config.name)
        if row.state.terminal and 0.0 < known_end(row) < now - limit
    ]
    return sum([(await store.forget(some)).rollouts for some in _parts(old)])


async def keep(store: Store, config: RunConfig) -> None:
    """Delete old sessions from time to time, until cancelled."""
    limit = config.live.people.retention
    while limit is not None:
        try:
            if gone := await expire(store, config, time.time()):
                log.info("%d sessions are older than live.people.retention: deleted", gone)
        except StoreError as error:
            log.warning("no old session was deleted: %s; tried again", error)
        await asyncio.sleep(min(max(LEAST_PAUSE, limit / 10), LONGEST_PAUSE))
