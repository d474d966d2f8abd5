"""Chooses the server for each call: the current server of a policy, or a frozen endpoint.

The rollout's seats map a role, or a policy, to a policy, then the run file's table of roles; for a
role that neither names, the model name that the agent asks for decides.

Owns: a copy of the policies table, at most `MIN_READ_INTERVAL` seconds behind the store's change
feed.
Always true: a call to a policy that is published without a base URL, because its weights are being
updated, waits; frozen endpoints are never held.
Who may write: its own event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from agentrl.access import read_key
from agentrl.config import UpstreamConfig
from agentrl.errors import StoreError
from agentrl.store.base import Store
from agentrl.types import PolicyVersion

log = logging.getLogger("agentrl.runner")
Seats = Mapping[str, str]  # role -> policy or frozen endpoint
NO_SEATS: Seats = MappingProxyType({})
MIN_READ_INTERVAL = 0.1  # seconds; every write moves the feed, few of them move a policy
DEFAULT = "policy"


class Route(NamedTuple):
    """The server that answers a call."""

    policy: str  # name of the policy or of the frozen endpoint
    version: int | None
    base_url: str  # ends in /v1
    model: str  # the name the server answers to; empty: the one the agent asks for
    key: str = ""  # its own API key
    frozen: bool = False  # it is not trained
    text: str | None = None  # the answer to every call, where there is no server


class Router:
    """Maps seats, role and model name of a request to the server that answers it."""

    def __init__(
        self,
        store: Store,
        run: str,
        upstreams: Mapping[str, UpstreamConfig] | None = None,
        roles: Mapping[str, str] | None = None,
        policies: Collection[str] = (),
        *,
        remote: bool = False,
        key: str = "",
    ) -> None:
        """`policies`: those of a run that has several, each for the roles that are mapped to it.
        `remote`: the run has none at all, and waits for none. `key`: that policy servers ask for.

        Raises ConfigError when the key of a frozen endpoint is not in the environment."""
        self.store, self.run = store, run
        self.policies: dict[str, PolicyVersion] = {}
        self.frozen = {name: _frozen(name, made) for name, made in (upstreams or {}).items()}
        self.roles = roles or {}
        self.several = tuple(policies) if len(policies) > 1 else ()
        self.default = next(iter(policies)) if len(policies) == 1 else DEFAULT
        self.remote, self._key = remote, key
        self.read = asyncio.Event()  # set once the policies table was read
        self._changed = asyncio.Event()  # set and replaced whenever a route may have changed

    async def follow(self) -> None:
        """Update the copy of the policies table whenever it changes; never returns."""
        cursor = 0
        while True:
            try:
                cursor = await self.store.wait(cursor)
                self.policies = await self.store.policies(self.run)
                self.read.set()
            except StoreError as error:  # the last copy may still be right
                log.warning("the routes of run %s cannot be read: %s", self.run, error)
                cursor = 0
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.sleep(MIN_READ_INTERVAL)

    async def route(self, model: str, role: str, seats: Seats = NO_SEATS) -> Route:
        """The server for one call. Waits while the policy is not served."""
        while (route := self.find(model, role, seats)) is None:
            await self._changed.wait()
        return route

    @property
    def ready(self) -> bool:
        """Whether calls can be answered, as far as is known."""
        return bool(self.policies) or self.remote

    def why_unmapped(
        self, model: str, role: str, seats: Seats = NO_SEATS, inside: Sequence[str] = ()
    ) -> str:
        """Why no policy or endpoint of the run can ever answer a call; empty if one can, now or
        later. inside: names of agents around the call, none of them a role."""
        if not self.several and (self.policies or not self.remote):
            return ""
        served = {policy.model for policy in self.policies.values()}
        named = model in {*self.several, *self.policies, *self.frozen, *served}
        if named or self.policy_of_role(role, seats) is not None:
            return ""
        around = f", inside of {', '.join(map(repr, inside))}" if inside else ""
        request = f"the role {role!r}{around}, which asks for the model {model!r:.80}"
        if self.remote and not self.policies:
            return (
                f"no endpoint plays {request}, and the run has no model of its own: map it to one"
                f" of {', '.join(map(repr, sorted(self.frozen)))} in [roles], or set policy.model"
            )
        if DEFAULT in self.several:
            return ""
        players = ", ".join(f"{role!r} by {name!r}" for role, name in sorted(self.roles.items()))
        return (
            f"no policy plays {request}: the run file has {players}. Add one of its names to the "
            "roles of a policy (policies.NAME.roles), or ask for a policy by its name"
        )

    def find(self, model: str, role: str, seats: Seats = NO_SEATS) -> Route | None:
        """By role, if the rollout's seats or the run file map it, else by the requested name: a
        frozen endpoint, a policy, a served model. Agents keep their own model names
        ("gpt-4o-mini"), so any other name is the policy that is trained, where there is one. Seats
        may put another policy in the place of what is found. None: it cannot answer now."""
        mapped = self.policy_of_role(role, seats)
        name = model if mapped is None else mapped
        if name in self.frozen:
            return self.frozen[name]
        policy = self.policies.get(name)
        if policy is None and mapped is None:
            served = (p for p in self.policies.values() if p.model == name)
            policy = next(served, None) or self.policies.get(self.default)
            policy = policy or next(iter(() if self.several else self.policies.values()), None)
        if policy is not None and policy.policy in seats:
            policy = self.policies.get(seats[policy.policy])
        if policy is None or not policy.base_url:
            return None
        return Route(policy.policy, policy.version, policy.base_url, policy.model, self._key)

    def policy_of_role(self, role: str, seats: Seats) -> str | None:
        """The policy or endpoint of a role; None where neither seats nor run file name one."""
        return seats.get(role) or self.roles.get(role)

    def why_not_served(self, role: str, seats: Seats) -> str:
        """Why `find` has no route at the moment."""
        name = self.policy_of_role(role, seats)
        if name is None or name in self.policies:
            return "no policy server was ready for this call"
        return f"nobody serves the policy {name!r}, which plays the role {role!r} here"


def _frozen(name: str, config: UpstreamConfig) -> Route:
    key = read_key(config.key_env, f"upstreams.{name}.key_env", "the endpoint's")
    url = config.base_url.rstrip("/")
    return Route(name, None, url, config.model, key, frozen=True, text=config.text)
