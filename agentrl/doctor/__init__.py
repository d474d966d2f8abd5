"""`agentrl doctor`: checks of a machine and of a run, and proofs of what a run would rely on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from agentrl.errors import AgentRLError
from agentrl.threads import run_blocking

Status = Literal["ok", "warn", "fail"]  # fail: a run would not work; warn: not as well as it could


class Finding(NamedTuple):
    name: str
    status: Status
    sentence: str
    cure: str = ""


def run_check(check: Callable[..., Any], *given: object) -> Iterator[Finding]:
    """The finding of a check, which may be async, under the name of its function. A check returns a
    status and "sentence; cure", or None where it does not apply; an AgentRLError is a failure."""
    try:
        found = check(*given)
        found = run_blocking(found) if inspect.iscoroutine(found) else found
    except AgentRLError as error:
        found = "fail", str(error)
    if found:
        sentence, _, cure = found[1].partition("; ")
        yield Finding(check.__name__, found[0], sentence, cure)
