"""`agentrl doctor`: checks of a machine and of a run, and proofs on its hardware."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from agentrl.base.threads import run_blocking
from agentrl.errors import AgentRLError

Status = Literal["ok", "warn", "fail"]  # fail: a run would not work; warn: it could work better


class Finding(NamedTuple):
    name: str
    status: Status
    sentence: str
    cure: str = ""


def run_check(check: Callable[..., Any], *given: object) -> Iterator[Finding]:
    """Yield the finding of a check, if any, under the name of its function, which may be async. A
    check returns a status and "sentence; cure", or None if it does not apply; an AgentRLError is a
    failure."""
    try:
        found = check(*given)
        found = run_blocking(found) if inspect.iscoroutine(found) else found
    except AgentRLError as error:
        found = "fail", str(error)
    if found:
        sentence, _, cure = found[1].partition("; ")
        yield Finding(check.__name__, found[0], sentence, cure)
