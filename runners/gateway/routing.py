"""Selects the server of each call: the current server of a policy, or a frozen endpoint.

The rollout's seats, then the run file's table of roles map a role to a policy; for a role in
neither, the requested model name decides. Seats can also replace one policy by another.

Owns: a copy of the policies table, at most `MIN_READ_INTERVAL` seconds behind the store's change
feed.
Invariant: a call to a policy that is published without a base URL, because its weights are being
updated, waits; calls to frozen endpoints never wait.
Writer: its own event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from agentrl.base.access import read_sent_key
from agentrl.config import UpstreamConfig
from agentrl.errors import StoreError
from agentrl.store.base import Store
from agentrl.types import SIDE, PolicyVersion

log = logging.getLogger("agentrl.runner")
Seats = Mapping[str, str]  # role -> policy or frozen endpoint
NO_SEATS: Seats = MappingProxyType({})
MIN_READ_INTERVAL = 0.1  # seconds; every write advances the feed, few change a policy
DEFAULT = "policy"


class Route(NamedTuple):
    """The server for a call."""

    policy: str  # name of the policy or frozen endpoint
    version: int | None
    base_url: str  # ends in /v1
    model: str  # model name at the server; empty: the one the agent asks for
    key: str = ""  # API key of the server
    frozen: bool = False  # not trained
    text: str | None = None  # fixed response to every call, instead of a server


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
        """`policies`: names of a run's policies, each for the roles mapped to it. `remote`: the run
        has no policy, so calls do not wait for one. `key`: API key of policy servers.

        Raises ConfigError if the key of a frozen endpoint is not in the environment."""
        self.store, self.run = store, run
        self.policies: dict[str, PolicyVersion] = {}
        self.frozen = {name: _frozen(name, made) for name, made in (upstreams or {}).items()}
        self.roles = roles or {}
        self.several = tuple(policies) if len(policies) > 1 else ()
        self.default = next(iter(policies)) if len(policies) == 1 else DEFAULT
        self.remote, self._key = remote, key
        self.read = asyncio.Event()  # set after the first read of the policies table
        self._changed = asyncio.Event()  # set and replaced whenever a route may have changed

    async def follow(self) -> None:
        """Update the copy of the policies table whenever it changes; never returns."""
        cursor = 0
        while True:
            try:
                cursor = await self.store.wait(cursor)
                self.policies = await self.store.policies(self.run)
                self.read.set()
            except StoreError as error:  # the last copy may still be valid
                log.warning("the routes of run %s cannot be read: %s", self.run, error)
                cursor = 0
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.sleep(MIN_READ_INTERVAL)

    async def route(self, model: str, role: str, seats: Seats = NO_SEATS) -> Route:
        """Return the server of one call; wait while its policy is not served."""
        while (route := self.find(model, role, seats)) is None:
            await self._changed.wait()
        return route

    @property
    def ready(self) -> bool:
        """Whether calls can be answered, to current knowledge."""
        return bool(self.policies) or self.remote

    def why_unmapped(
        self, model: str, role: str, seats: Seats = NO_SEATS, inside: Sequence[str] = ()
    ) -> str:
        """Explain why no policy or endpoint of the run can ever answer a call; empty if one can,
        now or later. `inside`: names of agents around the call, none of them a role."""
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
        """Find the server by role, if the rollout's seats or the run file map it, else by model
        name: a frozen endpoint, a policy, a served model. Agents keep their own model names
        ("gpt-4o-mini"), so any other name means the trained policy, if there is a single one. Seats
        may replace the policy that is found. Returns None if the policy is not served now."""
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

    def is_chosen(self, model: str, role: str, seats: Seats) -> bool:
        """Whether a call asks for the policy that answers it, by its role or its model's name. A
        call without a model's name asks for any."""
        names = {policy.model for policy in self.policies.values()}
        names |= {"", self.default, *self.policies, *self.several}
        return model in names or self.policy_of_role(role, seats) is not None

    def is_aside(self, role: str, seats: Seats) -> bool:
        """Whether calls of a role are outside the agent's work, and none trains a policy."""
        return role == SIDE and self.policy_of_role(role, seats) is None

    def policy_of_role(self, role: str, seats: Seats) -> str | None:
        """Return the policy or endpoint of a role; None if neither seats nor run file map it."""
        return seats.get(role) or self.roles.get(role)

    def why_not_served(self, role: str, seats: Seats) -> str:
        """Explain why `find` returns None at the moment."""
        name = self.policy_of_role(role, seats)
        if name is None or name in self.policies:
            return "no policy server was ready for this call"
        return f"nobody serves the policy {name!r}, which plays the role {role!r} here"


def _frozen(name: str, config: UpstreamConfig) -> Route:
    key = read_sent_key(config.key_env, f"upstreams.{name}.key_env", "the endpoint's")
    url = config.base_url.rstrip("/")
    return Route(name, None, url, config.model, key, frozen=True, text=config.text)
