"""How a feature joins the gateway, which knows none of them.

A feature is asked twice: when the server is made, for what it does at every request or server, and
for each attempt that it may take part in, before the first call. What it adds to one attempt, the
calls of others do not pass.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.upstream import Upstream
from agentrl.types import Transition

Change = Callable[[ReceivedCall], ReceivedCall]
"""Returns another call in place of the agent's; in `ActiveAttempt.changes`. A call is changed again
if it is parsed again."""

Answer = Callable[[ReceivedCall], Awaitable[Sequence[Transition]]]
"""Returns the choices that answer a call in place of the policy, or none; in
`ActiveAttempt.answers`."""

Record = Callable[[ReceivedCall, Transition], Transition]
"""Returns the row to be stored in place of a call's; in `ActiveAttempt.records`."""


class Feature:
    """Base class of what adds to the gateway; does nothing."""

    def add_to(self, app: web.Application, upstream: Upstream) -> None:
        """Add middlewares and routes to the server before it starts, or adapters to the client of
        policy servers. Runs on the gateway's event loop."""

    def join(self, active: ActiveAttempt) -> None:
        """Add to the changes, answers and records of an attempt, or replace its sight. Not called
        for a verifier's."""
