"""Who claimed an attempt: of the callers with a runner key, only that one writes to it.

Such a caller sends a secret of its own in the header `agentrl-claim-secret`. The server stores its
SHA-256 as a part of the claim's id, so a claim that is repeated with the same secret finds its
attempts after a restart too, and the database tells nobody the secret. Owns: the run and the claim
of attempts, as far as they were looked up; neither ever changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, cast

from agentrl.errors import Forbidden, Invalid
from agentrl.store.base import Store
from agentrl.store.http.keys import KeyGrant
from agentrl.store.http.wire import CLAIM_SECRET, KeyScope
from agentrl.store.limits import check_ids
from agentrl.store.sqlstore import SqlStore

SHORTEST = 16  # bytes of a secret
REMEMBERED = 65_536  # attempts
ATTEMPTS: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
    "heartbeat": lambda arguments: arguments["attempts"],
    "finish": lambda arguments: (row.attempt for row in arguments["outcomes"]),
    "add_transitions": lambda arguments: (row.attempt for row in arguments["transitions"]),
    "add_spans": lambda arguments: (row.attempt for row in arguments["spans"]),
}
"""The verbs that write to attempts, and which attempts their arguments name."""


class Claims:
    """The claims of one server's store."""

    def __init__(self, store: Store) -> None:
        self._store = cast(SqlStore, store)  # a server is in front of a database
        self._known: dict[str, tuple[str, str | None]] = {}

    async def check(self, verb: str, arguments: dict[str, Any], caller: KeyGrant) -> None:
        """Raises Forbidden for an attempt that the caller did not claim. Replaces the id of a claim
        by the one that is stored."""
        if caller.scope is not KeyScope.RUNNER:
            return
        if verb == "claim":
            arguments["claim_id"] = _stored_id(arguments["claim_id"], caller)
        elif verb in ATTEMPTS:
            attempts = set(ATTEMPTS[verb](arguments))
            await self._look_up(attempts)
            await self.check_run(attempts, caller)
            owner = _owner(caller)
            for attempt in attempts & self._known.keys():
                if (self._known[attempt][1] or "").partition(":")[2] != owner:
                    raise Forbidden(
                        f"{verb}: attempt {attempt} was claimed by another caller: send the "
                        f"{CLAIM_SECRET} that it was claimed with."
                    )

    async def check_run(self, attempts: set[str], caller: KeyGrant) -> None:
        """Raises Forbidden for an attempt of a run that the caller's key is not for."""
        if not caller.run:
            return
        await self._look_up(attempts)
        for attempt in attempts & self._known.keys():
            if self._known[attempt][0] != caller.run:
                raise Forbidden(f"Attempt {attempt}: this key is for run {caller.run!r} only.")

    async def _look_up(self, attempts: set[str]) -> None:
        if unknown := attempts - self._known.keys():
            if len(self._known) > REMEMBERED:
                self._known.clear()
            self._known |= await self._store.claims(sorted(unknown))


def _stored_id(claim_id: str | None, caller: KeyGrant) -> str:
    if not claim_id:
        raise Invalid("claim needs a claim_id of your own, with which a lost answer is had again.")
    check_ids("A claim's id", [claim_id])
    return f"{sha256(claim_id.encode()).hexdigest()}:{_owner(caller)}"


def _owner(caller: KeyGrant) -> str:
    """The hash of the caller's secret."""
    if len(caller.secret) < SHORTEST:
        raise Forbidden(
            f"With a runner key, send a random secret of at least {SHORTEST} characters in the "
            f"header {CLAIM_SECRET}, the same with every call: only who "
            "claimed an attempt may end it."
        )
    return sha256(caller.secret).hexdigest()
