"""User code that blocks, run beside the event loop without being able to hold the process back."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def call(function: Callable[..., T], *arguments: object) -> T:
    """`function(*arguments)` in a thread of its own that sees the caller's context variables.

    A thread of a pool that never returns would shrink the pool and block the interpreter's exit;
    a daemon thread does neither. When the caller is cancelled the thread is abandoned and what it
    returns is dropped."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return  # the caller has given up
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def work() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = context.run(function, *arguments)
        except StopIteration as stop:  # a future refuses it
            error = RuntimeError(f"the function raised StopIteration({stop.value!r})")
        except BaseException as raised:  # noqa: BLE001 - handed to whoever awaits
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name=f"agentrl-{function!r:.40}", daemon=True).start()
    return await future
