"""Blocking user code beside the event loop, without the power to hold the process back.

A thread of a pool that never returns shrinks the pool, then blocks the interpreter's exit. Here
every call has a daemon thread of its own: one that hangs costs its memory and nothing else.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(...)` in a thread that sees the caller's context variables.

    When the caller is cancelled the thread is abandoned and what it returns is dropped."""
    context = contextvars.copy_context()
    return await asyncio.wrap_future(_start(partial(context.run, function, *args, **kwargs)))


class DaemonThreads(ThreadPoolExecutor):
    """An executor for `loop.set_default_executor`, where frameworks run the sync tools of async
    agents. It has no limit: tools of other rollouts never wait for one that hangs."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return _start(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """There is nothing to wait for."""


def _start(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_run, args=(work, future), name="agentrl-call", daemon=True).start()
    return future


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except StopIteration as stop:  # an asyncio future refuses it
        future.set_exception(RuntimeError(f"the function raised StopIteration({stop.value!r})"))
    except BaseException as error:  # noqa: BLE001 - handed to whoever awaits
        future.set_exception(error)
