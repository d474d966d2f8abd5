"""Lines on the console about calls that a policy answers, each said once."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from agentrl.runners.gateway.attribution import CallOrigin
from agentrl.runners.gateway.routing import Route
from agentrl.runners.gateway.upstream import Upstream
from agentrl.types import Sampling


def warn_of_name(upstream: Upstream, route: Route, caller: CallOrigin, model: str) -> None:
    """Say that a policy answers for a model that the run file does not name, once for each name."""
    role, active = caller.role_of(model), caller.attempt
    if model in active.roles or upstream.router.is_chosen(model, role, active.seats):
        return
    name = repr(model[:80]).replace("%", "%%")
    table = msgspec.json.encode(model[:80]).decode().replace("%", "%%")
    upstream.warn_once(
        f"the policy %r answers for the model {name}, which neither a policy nor an endpoint has as"
        " its name, and is trained on these calls. If they are not the agent's own work, but a"
        f" judge's or a simulated user's, add their model as [upstreams.{table}], or map their"
        " role, now %r, to an endpoint of [upstreams] in [roles]",
        *(route.policy, role),
    )


def warn_of_processors(upstream: Upstream, route: Route, found: Collection[str]) -> None:
    """Say that calls are not sampled from the policy's own distribution."""
    if found:
        upstream.warn_once(
            f"policy {route.policy}: calls with {', '.join(found)} are not sampled from the"
            " policy's own distribution; the learner scores their tokens itself, as if they were"
            " (calls/processed)"
        )


def warn_of_doubt(upstream: Upstream, route: Route, doubts: Iterable[str]) -> None:
    """Say why a response is recorded as inexact."""
    if doubt := next(filter(None, doubts), ""):
        upstream.warn_once("policy %s: a call is inexact, as %s", route.policy, doubt)


def warn_of_sampling(upstream: Upstream, route: Route, used: Sampling, defaults: Sampling) -> None:
    """Say that the agent's sampling is not the run file's."""
    names = ("temperature", "top_p", "top_k", "max_tokens")
    wanted = ((name, getattr(defaults, name)) for name in names)
    other = [name for name, value in wanted if value not in (None, getattr(used, name))]
    if other:
        upstream.warn_once(
            "policy %s: the agent overrules the run file's sampling with %s; sampling.force = true"
            " would keep the run file's temperature, top_p and top_k",
            *(route.policy, ", ".join(f"{name} = {getattr(used, name)}" for name in other)),
        )
