"""`agentrl doctor`: checks of a machine and of a run, and proofs on its hardware."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import click

from agentrl.core.errors import AgentRLError
from agentrl.core.processes import run_blocking

Status = Literal["ok", "warn", "fail"]  # fail: a run would not work; warn: it could work better


class Finding(NamedTuple):
    name: str
    status: Status
    sentence: str
    cure: str = ""


PATIENCE = 15.0  # seconds after which a check says that it is still running


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Context that prints to standard error what it waits for, if that takes long."""
    done = threading.Event()

    def watch() -> None:
        seconds = PATIENCE
        while not done.wait(PATIENCE):
            click.echo(f"waiting for {what} ({seconds:.0f} s so far)", err=True)
            seconds += PATIENCE

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


def run_check(check: Callable[..., Any], *arguments: object) -> Iterator[Finding]:
    """Yield the finding of a check, if any, under the name of its function, which may be async. A
    check returns a status and "sentence; fix", or None if it does not apply; an AgentRLError is a
    failure."""
    about = (check.__doc__ or "").partition("\n")[0].partition(". ")[0].rstrip(".")
    try:
        with waiting(f"{check.__name__}: {about}".removesuffix(": ")):
            result = check(*arguments)
            result = run_blocking(result) if inspect.iscoroutine(result) else result
    except AgentRLError as error:
        result = "fail", str(error)
    if result:
        sentence, _, cure = result[1].partition("; ")
        yield Finding(check.__name__, result[0], sentence, cure)
