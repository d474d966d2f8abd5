"""Run blocking code from an event loop, and coroutines from blocking code.

A pool thread that never returns shrinks the pool, then blocks the interpreter's exit. So every call
of a user's blocking code gets its own daemon thread, which costs only memory if it hangs.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function(...)` in a thread with the caller's context variables.

    If the caller is cancelled, the thread is abandoned and its result dropped."""
    context = contextvars.copy_context()
    return await asyncio.wrap_future(_start(partial(context.run, function, *args, **kwargs)))


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is finished also if the caller is cancelled meanwhile. Then
    CancelledError is raised after it, unless `work` raises."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result


class DaemonThreads(ThreadPoolExecutor):
    """An executor for `loop.set_default_executor`, in which frameworks run sync tools of async
    agents. The number of threads is unlimited: no tool waits for another rollout's that hangs."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return _start(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: daemon threads need no shutdown."""


def _start(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=_run, args=(work, future), name="agentrl-call", daemon=True).start()
    return future


def _run(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except StopIteration as stop:  # asyncio futures do not accept it
        future.set_exception(RuntimeError(f"the function raised StopIteration({stop.value!r})"))
    except BaseException as error:  # noqa: BLE001 - raised again by the caller's await
        future.set_exception(error)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result, also in a notebook, whose event loop is running."""
    if not _in_event_loop():  # outside of an `except`, which would be the context of its errors
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-front") as executor:
        loop = asyncio.new_event_loop()
        task = loop.create_task(work)
        running = executor.submit(loop.run_until_complete, task)
        running.add_done_callback(lambda _: loop.close())
        try:
            return running.result()
        except KeyboardInterrupt:  # "interrupt" in a notebook: stop the children, then the cell
            loop.call_soon_threadsafe(task.cancel)
            raise


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
