"""Who inside a multi-agent system makes a model call: the rule, in one place.

The role of a call is the first of
  1. the one in the path, `/a/{attempt}/{role}/v1`;
  2. the one in the baggage, `agentrl.role`, which `agentrl.role("critic")` sets around a call;
  3. of the names that frameworks gave to the nodes and agents around the call, see `frameworks`,
     the first that is known: the run file gives it to a policy or an upstream, or the rollout has a
     seat for it;
  4. the requested model's name, if it is a known role;
and "agent" where there is none. A name that is not known is no role: the node "model" inside every
`create_agent` is the agent itself. An explicit role (1, 2) need not be known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote, unquote

from opentelemetry import baggage, context

from agentrl.runners.tracing import attempt_log, frameworks
from agentrl.runners.tracing.attempt_log import AttemptLog, HttpCall

DEFAULT = "agent"
ROLE = "agentrl.role"  # baggage keys: what the code says,
NAMES = "agentrl.names"  # and the names of the steps around the call, innermost first


def resolve(
    known: Collection[str], *, path: str | None, said: str | None, names: Sequence[str]
) -> str | None:
    """Rules 1 to 3: `path` and `said` as they are, of `names` the first that is `known`."""
    return path or said or next((name for name in names if name in known), None)


def role_of_model(role: str | None, model: str, known: Collection[str]) -> str:
    """Rule 4 and the default, for a call whose `role` is not known yet."""
    return role or (model if model in known else DEFAULT)


@contextmanager
def role(name: str) -> Iterator[None]:
    """Model calls made inside the block, also in its tasks and threads, belong to role `name`.

    Outside of a rollout it does nothing. Raises ValueError for an empty name."""
    if not name or not isinstance(name, str):
        raise ValueError(f"a role needs a name, not {name!r}")
    if attempt_log.current() is None:
        yield
        return
    token = context.attach(baggage.set_baggage(ROLE, name))
    try:
        yield
    finally:
        context.detach(token)


def baggage_items(log: AttemptLog, call: HttpCall) -> list[str]:
    """What the W3C baggage of a call says about the caller; empty where there is nothing to say."""
    values = {key: str(value) for key, value in baggage.get_all().items()}
    if ROLE not in values:
        names = ",".join(quote(name, safe="") for name in frameworks.names(log, call))
        values |= {NAMES: names} if names else {}
    return [f"{key}={quote(value, safe='')}" for key, value in values.items()]


def read_names(value: str | None) -> list[str]:
    """The names that `baggage_items` wrote under `NAMES`, its own quoting already undone."""
    return [unquote(name) for name in (value or "").split(",") if name]
