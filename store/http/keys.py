"""Bearer keys and their scopes. Keys are compared in constant time and never printed."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from functools import lru_cache

from agentrl.addresses import is_loopback
from agentrl.errors import ConfigError
from agentrl.store.http.wire import Scope

VARIABLE = "AGENTRL_STORE_KEYS"
SHORTEST = 8  # characters


@dataclass(frozen=True, slots=True)
class Keys:
    """Who may do what. Without any key everybody is an administrator: only for loopback."""

    _known: tuple[tuple[bytes, Scope], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str, source: str) -> Keys:
        """From lines (or words) such as `runner:SECRET`; `#` begins a comment. Raises ConfigError
        that names `source` and the line, never the key, and when there is no key: whoever gives
        keys does not mean to serve everybody."""
        known: dict[bytes, Scope] = {}
        for number, line in enumerate(text.splitlines(), 1):
            for word in line.partition("#")[0].split():
                name, _, key = word.partition(":")
                if name not in ("runner", "admin") or len(key) < SHORTEST or not key.isascii():
                    raise ConfigError(
                        f"{source}, line {number}: write runner:KEY or admin:KEY with a key of at"
                        f" least {SHORTEST} ASCII characters"
                    )
                if known.setdefault(key.encode(), Scope[name.upper()]).name != name.upper():
                    raise ConfigError(f"{source}, line {number}: one key cannot have two scopes")
        if not known:
            raise ConfigError(
                f"{source} has no key: write a line admin:KEY or runner:KEY, or do not give it"
            )
        return cls(tuple(known.items()))

    def __bool__(self) -> bool:
        return bool(self._known)

    def scope(self, authorization: bytes) -> Scope | None:
        """What the caller with this header may do; None for a missing or unknown key. Every key is
        looked at, so that the time does not tell which of them began alike."""
        if not self._known:
            return Scope.ADMIN
        kind, _, secret = authorization.partition(b" ")
        found = None
        for key, scope in self._known:
            if hmac.compare_digest(secret.strip(), key) and kind.lower() == b"bearer":
                found = scope
        return found


def loopback(host: str) -> bool:
    """Whether this name or address, which may be that of an URL, always means this machine."""
    return is_loopback(host.removeprefix("[").removesuffix("]"))


@lru_cache(64)
def addressed_here(host: bytes) -> bool:
    """Whether a request with this header Host meant this machine. Elsewhere a web page may have
    let its own name point here, to read with its visitor's browser what needs no key."""
    name = host.decode("latin-1").lower()
    if not name.endswith("]"):  # an IPv6 address without a port
        name = name.rpartition(":")[0] or name
    return not name or loopback(name)
