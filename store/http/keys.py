"""Bearer keys: what each may do, in which run, until when. They are compared in constant time and
never printed."""

from __future__ import annotations

import hmac
import logging
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from agentrl.addresses import is_loopback
from agentrl.errors import ConfigError
from agentrl.store.http.wire import KeyScope

VARIABLE = "AGENTRL_STORE_KEYS"
SHORTEST = 8  # characters
LOOK = 1.0  # seconds after which it is looked whether a file of keys has changed
log = logging.getLogger("agentrl.store")


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """What whoever sent a request may do."""

    scope: KeyScope
    run: str = ""  # the only one it has to do with; empty: all
    until: float = math.inf  # unix seconds
    secret: bytes = field(default=b"", repr=False)  # of its claims; see `claims`


@dataclass(frozen=True, slots=True)
class Keys:
    """Who may do what. Without any key everybody is an administrator: only for loopback."""

    _known: tuple[tuple[bytes, KeyGrant], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str, source: str) -> Keys:
        """From lines (or words) such as `runner:SECRET` or `runner@RUN:SECRET;until=2030-01-31`, a
        time of UTC; `#` begins a comment. Raises ConfigError
        that names `source` and the line, never the key, and when there is no key: whoever gives
        keys does not mean to serve everybody."""
        known: dict[bytes, KeyGrant] = {}
        for number, line in enumerate(text.splitlines(), 1):
            for word in line.partition("#")[0].split():
                try:
                    key, caller = _entry(word)
                except ValueError:  # whose text may repeat the key
                    raise ConfigError(
                        f"{source}, line {number}: write runner:KEY, runner@RUN:KEY or admin:KEY"
                        f" with a key of at least {SHORTEST} ASCII characters, and if it is to"
                        " expire ;until=YYYY-MM-DD after it"
                    ) from None
                if known.setdefault(key, caller) != caller:
                    raise ConfigError(f"{source}, line {number}: one key cannot have two scopes")
        if not known:
            raise ConfigError(
                f"{source} has no key: write a line admin:KEY or runner:KEY, or do not give it"
            )
        return cls(tuple(known.items()))

    def __bool__(self) -> bool:
        return bool(self._known)

    def caller(self, authorization: bytes, now: float) -> KeyGrant | None:
        """Whoever sent this header; None for a missing, unknown or expired key. Every key is
        looked at, so that the time does not tell which of them began alike."""
        if not self._known:
            return KeyGrant(KeyScope.ADMIN)
        kind, _, secret = authorization.partition(b" ")
        found = None
        for key, caller in self._known:
            if hmac.compare_digest(secret.strip(), key) and kind.lower() == b"bearer":
                found = caller
        return None if found is None or found.until <= now else found


class KeyFile:
    """Keys of a file, which is read again when it has changed: keys are added and taken back
    without a restart. While it cannot be read those of before hold."""

    def __init__(self, path: Path) -> None:
        self._path, self._looked = path, -math.inf
        self._changed = path.stat().st_mtime_ns
        self._keys = Keys.parse(path.read_text(), str(path))

    def __bool__(self) -> bool:
        return True

    def caller(self, authorization: bytes, now: float) -> KeyGrant | None:
        if abs(now - self._looked) >= LOOK:
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
            log.warning("the keys of before are still in use: %s", error)


def _entry(word: str) -> tuple[bytes, KeyGrant]:
    """Raises ValueError for what is no key."""
    name, _, key = word.partition(":")
    kind, at, run = name.partition("@")
    key, expires, date = key.partition(";until=")
    if (kind, bool(at)) not in (("runner", True), ("runner", False), ("admin", False)):
        raise ValueError
    if len(key) < SHORTEST or not key.isascii() or (at and not run):
        raise ValueError
    until = math.inf
    if expires:
        time = datetime.fromisoformat(date)
        until = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return key.encode(), KeyGrant(KeyScope[kind.upper()], run, until)


def is_loopback_host(host: str) -> bool:
    """Whether this name or address, which may be that of an URL, always means this machine."""
    return is_loopback(host.removeprefix("[").removesuffix("]"))


@lru_cache(64)
def is_for_this_machine(host: bytes) -> bool:
    """Whether a request with this header Host meant this machine. Elsewhere a web page may have
    let its own name point here, to read with its visitor's browser what needs no key."""
    name = host.decode("latin-1").lower()
    if not name.endswith("]"):  # an IPv6 address without a port
        name = name.rpartition(":")[0] or name
    return not name or is_loopback_host(name)
