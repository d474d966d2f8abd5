"""Where each policy is served right now: the store's policies table, followed.

Owns: a copy of the table, never older than `THROTTLE` seconds behind the store's change feed.
Who may write: its own `follow` task.
"""

from __future__ import annotations

import asyncio
import logging

from agentrl.errors import StoreError
from agentrl.store.base import Store
from agentrl.types import PolicyVersion

log = logging.getLogger("agentrl.runner")
THROTTLE = 0.1  # seconds between reads: every write moves the feed, few of them move a policy
DEFAULT = "policy"


class Router:
    """Maps the model name of a request to the server that answers it."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.run = store, run
        self.policies: dict[str, PolicyVersion] = {}
        self._served = asyncio.Event()

    async def follow(self) -> None:
        """Keep the copy fresh, for ever."""
        cursor = 0
        while True:
            try:
                cursor = await self.store.wait(cursor)
                self.policies = await self.store.policies(self.run)
            except StoreError as error:  # what was known may still be right
                log.warning("the routes of run %s cannot be read: %s", self.run, error)
                cursor = 0
            if self.policies:
                self._served.set()
            else:  # a new owner of the run has not published yet
                self._served.clear()
            await asyncio.sleep(THROTTLE)

    async def route(self, model: str) -> PolicyVersion:
        """The policy of that name or of that served model, else the one that is trained.

        Agents keep their own model names ("gpt-4o-mini"), so an unknown name is the default
        policy. Waits while no policy is served yet."""
        await self._served.wait()
        exact = self.policies.get(model)
        if exact is not None:
            return exact
        for policy in self.policies.values():
            if policy.model == model:
                return policy
        return self.policies.get(DEFAULT) or next(iter(self.policies.values()))
