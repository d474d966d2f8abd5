"""Keys of a served store, with scope, run and expiry, and the permission to write to an attempt.

Keys are compared in constant time and never printed. Among callers with a runner key, only the one
that claimed an attempt may write to it, identified by a random secret in the header
`agentrl-claim-secret`. The server stores the secret's SHA-256 as part of the claim's id: a repeated
claim with the same secret finds its attempts even after a restart, and the database does not
contain the secret.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from agentrl.core.errors import ConfigError, Forbidden, Invalid
from agentrl.store.base import Store
from agentrl.store.http.wire import CLAIM_SECRET, KeyScope
from agentrl.store.rows import check_ids
from agentrl.store.sql.store import SqlStore

VARIABLE = "AGENTRL_STORE_KEYS"
MIN_KEY_CHARS = 8  # characters
MIN_SECRET_BYTES = 16  # bytes
KEYS_LOOK_PAUSE = 1.0  # seconds between checks whether a key file has changed
MAX_ATTEMPTS_CACHED = 65_536  # cached attempts
ATTEMPTS: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
    "heartbeat": lambda arguments: arguments["attempts"],
    "finish": lambda arguments: (row.attempt for row in arguments["outcomes"]),
    "add_transitions": lambda arguments: (row.attempt for row in arguments["transitions"]),
    "add_spans": lambda arguments: (row.attempt for row in arguments["spans"]),
}
"""Verbs that write to attempts -> function from their arguments to the attempts."""
WHOLE_STORE = {"stats", "datasets", "items", "sides", "calls", "logprobs", "add_judgements"}
"""Verbs on data that several runs share."""
log = logging.getLogger("agentrl.store")


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """Permissions of the sender of a request."""

    scope: KeyScope
    run: str = ""  # the only permitted run; empty: all
    until: float = math.inf  # unix seconds
    secret: bytes = field(default=b"", repr=False)  # claim secret, see `Claims`


ADMINISTRATOR = KeyGrant(KeyScope.ADMIN)


@lru_cache(1024)
def with_secret(caller: KeyGrant, secret: bytes) -> KeyGrant:
    return replace(caller, secret=secret)


@dataclass(frozen=True, slots=True)
class Keys:
    """The known keys. Without keys every caller is an administrator: only for loopback."""

    _entries: tuple[tuple[bytes, KeyGrant], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str, source: str) -> Keys:
        """Parse lines (or words) such as `runner:SECRET` or `runner@RUN:SECRET;until=2030-01-31`
        (UTC); `#` begins a comment. Raises ConfigError, which names `source` and the line, but
        never the key; also if there is no key, because everybody would be served."""
        grants: dict[bytes, KeyGrant] = {}
        for number, line in enumerate(text.splitlines(), 1):
            for word in line.partition("#")[0].split():
                try:
                    key, caller = _entry(word)
                except ValueError:  # its message may contain the key
                    raise ConfigError(
                        f"{source}, line {number}: write runner:KEY, reader:KEY, admin:KEY, or"
                        " runner@RUN:KEY or reader@RUN:KEY for one run,"
                        f" with a key of at least {MIN_KEY_CHARS} ASCII characters, and if it is to"
                        " expire ;until=YYYY-MM-DD after it"
                    ) from None
                if grants.setdefault(key, caller) != caller:
                    raise ConfigError(f"{source}, line {number}: one key cannot have two scopes")
        if not grants:
            raise ConfigError(
                f"{source} has no key: write a line admin:KEY or runner:KEY, or do not give it"
            )
        return cls(tuple(grants.items()))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def caller(self, authorization: bytes, now: float) -> KeyGrant | None:
        """Return the permissions of this header's sender; None for a missing, unknown or expired
        key. Compares every key, so that the time does not reveal how much of a key was right."""
        if not self._entries:
            return ADMINISTRATOR
        kind, _, secret = authorization.partition(b" ")
        grant = None
        for key, caller in self._entries:
            if hmac.compare_digest(secret.strip(), key) and kind.lower() == b"bearer":
                grant = caller
        return None if grant is None or grant.until <= now else grant


class KeyFile:
    """Keys of a file, reloaded when it changes, without a restart. While the file is unreadable the
    previous keys remain valid."""

    def __init__(self, path: Path) -> None:
        self._path, self._looked = path, -math.inf
        self._changed = path.stat().st_mtime_ns
        self._keys = Keys.parse(path.read_text(), str(path))

    def __bool__(self) -> bool:
        return True

    def caller(self, authorization: bytes, now: float) -> KeyGrant | None:
        if abs(now - self._looked) >= KEYS_LOOK_PAUSE:
            self._looked = now
            self._read_again()
        return self._keys.caller(authorization, now)

    def _read_again(self) -> None:
        try:
            changed = self._path.stat().st_mtime_ns
            if changed != self._changed:
                self._changed = changed
                self._keys = Keys.parse(self._path.read_text(), str(self._path))
        except (OSError, ValueError, ConfigError) as error:
            log.warning("the earlier keys are still in use: %s", error)


def _entry(word: str) -> tuple[bytes, KeyGrant]:
    """Parse a key and its permissions. Raises ValueError for a malformed text."""
    name, _, key = word.partition(":")
    kind, at, run = name.partition("@")
    key, expires, date = key.partition(";until=")
    if kind not in tuple(KeyScope) or (at and kind == KeyScope.ADMIN):
        raise ValueError
    if len(key) < MIN_KEY_CHARS or not key.isascii() or (at and not run):
        raise ValueError
    until = math.inf
    if expires:
        time = datetime.fromisoformat(date)
        until = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return key.encode(), KeyGrant(KeyScope(kind), run, until)


class Claims:
    """Checks the owners of attempts. Caches run and claim of attempts, which never change."""

    def __init__(self, store: Store) -> None:
        self._store = cast(SqlStore, store)  # a server always has a database
        self._entries: dict[str, tuple[str, str | None]] = {}

    async def check(self, verb: str, arguments: dict[str, Any], caller: KeyGrant) -> None:
        """Raise Forbidden for an attempt that the caller did not claim. Replaces the id of a claim
        by the stored form."""
        if caller.scope is not KeyScope.RUNNER:
            return
        if verb == "claim":
            if not (claim_id := arguments["claim_id"]):
                raise Invalid("claim needs a claim_id of your own, with which you can repeat it.")
            check_ids("A claim's id", [claim_id])
            hashed = sha256(claim_id.encode()).hexdigest()
            arguments["claim_id"] = f"{hashed}:{_owner(caller)}"
        elif verb in ATTEMPTS:
            attempts = set(ATTEMPTS[verb](arguments))
            await self.check_run(attempts, caller)
            owner = _owner(caller)
            for attempt, (_, claim_id) in (await self._look_up(attempts)).items():
                if (claim_id or "").partition(":")[2] != owner:
                    raise Forbidden(
                        f"{verb}: attempt {attempt} was claimed by another caller: send the "
                        f"{CLAIM_SECRET} that it was claimed with."
                    )

    async def check_one_run(self, verb: str, arguments: dict[str, Any], run: str) -> None:
        """Raise Forbidden for a call on another run than `run`, or on the whole store."""
        about = {name: arguments[name] for name in ("rollout", "group") if name in arguments}
        if "run" in arguments:
            requested = arguments["run"]
        elif about:
            requested = await self._store.owner(**about) or run
        else:
            requested = "" if verb in WHOLE_STORE else run
        if requested != run:
            raise Forbidden(f"{verb}: this key is for run {run!r} only.")

    async def check_run(self, attempts: set[str], caller: KeyGrant) -> None:
        """Raise Forbidden for an attempt of a run that the caller's key does not permit."""
        if not caller.run:
            return
        for attempt, (run, _) in (await self._look_up(attempts)).items():
            if run != caller.run:
                raise Forbidden(f"Attempt {attempt}: this key is for run {caller.run!r} only.")

    async def _look_up(self, attempts: set[str]) -> dict[str, tuple[str, str | None]]:
        """Return run and claim of each known attempt."""
        claims = {id: self._entries[id] for id in attempts & self._entries.keys()}
        if unknown := attempts - claims.keys():
            new = await self._store.claims(sorted(unknown))
            if len(self._entries) > MAX_ATTEMPTS_CACHED:
                self._entries.clear()
            self._entries |= new
            claims |= new
        return claims


def _owner(caller: KeyGrant) -> str:
    """Return the hash of the caller's secret. Raises Forbidden if it is missing or short."""
    if len(caller.secret) < MIN_SECRET_BYTES:
        raise Forbidden(
            f"With a runner key, send a random secret of at least {MIN_SECRET_BYTES} characters in "
            f"the header {CLAIM_SECRET}, the same with every call: only who claimed an attempt may "
            "end it."
        )
    return sha256(caller.secret).hexdigest()
