"""Threads that an agent starts belong to its attempt, as its asyncio tasks do.

Python gives a new thread an empty context (until 3.14's `-X thread_inherit_context`), so a model
call in it would belong to no rollout. Inside attempts, and only there, a thread starts in a copy of
its starter's context, and so does each work item of a `ThreadPoolExecutor`. A thread that was
started inside one attempt and serves others belongs to the first: hand it work by `submit`, by
`asyncio.run_coroutine_threadsafe`, or with the context of whoever asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import cache, partial, wraps
from typing import Any

from agentrl.runners.tracing import attempt_log


@cache
def install() -> None:
    """Once for the life of the process."""
    start = threading.Thread.start
    submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit

    @wraps(start)
    def start_inside(self: threading.Thread) -> None:
        if attempt_log.current() is not None:
            vars(self)["run"] = partial(_run, self, self.run, copy_context())
        start(self)

    @wraps(submit)
    def submit_inside(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if attempt_log.current() is None:
            return submit(self, fn, *args, **kwargs)
        item = partial(copy_context().run, fn)
        # From an empty context: a worker thread that starts now will serve others too.
        return Context().run(submit, self, item, *args, **kwargs)

    setattr(threading.Thread, "start", start_inside)  # noqa: B010 - mypy refuses the assignment
    setattr(ThreadPoolExecutor, "submit", submit_inside)  # noqa: B010


def _run(thread: threading.Thread, run: Callable[[], None], inherited: Context) -> None:
    try:
        inherited.run(run)
    finally:
        vars(thread).pop("run", None)  # it refers to the thread itself
