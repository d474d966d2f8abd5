"""Calls to user code that turn every exception into an `Exception`.

`pytest.fail`, `sys.exit`, `GeneratorExit` and a cancellation that was not requested do not raise an
`Exception`: they would end the event loop or the process, and with it other rollouts. Only two pass
unchanged: the cancellation of the caller, and Ctrl-C at the terminal.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from agentrl.core import processes

T = TypeVar("T")
log = logging.getLogger(__name__)


class UserCodeError(Exception):
    """Replaces an exception of user code that is not an `Exception`; the original is the
    `__cause__`."""


def cause_of(error: BaseException) -> BaseException:
    """The exception that user code raised: the error itself, or the one that a `UserCodeError`
    replaces."""
    cause = error.__cause__ if isinstance(error, UserCodeError) else None
    return error if cause is None else cause


def text_of(error: BaseException) -> str:
    """The type and message of an exception of user code; its `__str__` may raise, too."""
    error = cause_of(error)
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001 - a class of the user's
        message = "(its message cannot be read)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@contextmanager
def contained() -> Iterator[None]:
    """Context for a synchronous call. Raises UserCodeError in place of what is not an
    `Exception`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or _is_interrupt(error):
            raise
        raise UserCodeError(text_of(error)) from error


async def awaited(work: Awaitable[T]) -> T:
    """Await user code. Raises UserCodeError in place of what is not an `Exception`, but
    CancelledError if the caller is cancelled meanwhile."""
    before = _cancelling()
    try:
        return await work
    except asyncio.CancelledError as error:
        if _cancelling() > before:
            raise
        raise UserCodeError(text_of(error)) from error
    except BaseException as error:
        closed = isinstance(error, GeneratorExit) and not _has_task()
        if isinstance(error, Exception) or closed or _is_interrupt(error):
            raise
        raise UserCodeError(text_of(error)) from error


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a user's function: a synchronous one in a thread, an async one in its own task, because
    a future that fails with GeneratorExit closes the whole task that awaits it. Raises as
    `awaited`."""
    if inspect.iscoroutinefunction(function):
        return await _in_task(function, *args, **kwargs)
    returned = await in_thread(function, *args, **kwargs)
    return await _in_task(lambda: returned) if inspect.isawaitable(returned) else returned


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`processes.call` for a user's function. Raises as `contained`."""
    return await processes.call(_contained, function, *args, **kwargs)


def _contained(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    with contained():
        return function(*args, **kwargs)


async def _in_task(function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    before = _cancelling()

    async def run() -> tuple[T | None, BaseException | None]:
        try:
            return await awaited(function(*args, **kwargs)), None
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised below
            return None, error

    value, error = await asyncio.create_task(run())
    if _cancelling() > before:
        raise asyncio.CancelledError
    if isinstance(error, asyncio.CancelledError):
        raise UserCodeError(text_of(error)) from error
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _cancelling() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _has_task() -> bool:
    """Whether code runs in a task; it does not while a loop that has ended closes its
    coroutines."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


def _is_interrupt(error: BaseException) -> bool:
    """Whether Python raised KeyboardInterrupt for Ctrl-C: in the main thread, if the process has
    not installed a handler for the signal."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or isinstance(handler, partial)  # asyncio.Runner's


class UserCodeLoop(asyncio.SelectorEventLoop):
    """An event loop that outlives SystemExit and KeyboardInterrupt of the tasks and callbacks that
    user code starts. The exception reaches the code that awaits such a task."""

    _main: asyncio.Future[Any] | None = None

    def run_until_complete(self, future: Any) -> Any:
        outer, self._main = self._main, asyncio.ensure_future(future, loop=self)
        try:
            return super().run_until_complete(self._main)
        finally:
            self._main = outer

    def run_forever(self) -> None:
        while True:
            try:
                return super().run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                if self._main is None or self._main.done() or _is_interrupt(error):
                    raise
                log.warning("a task or callback of user code raised %s", text_of(error))
