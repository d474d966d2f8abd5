"""What user code raises, whatever that is."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentrl.core import user_code
from agentrl.core.user_code import UserCodeError, UserCodeLoop

RAISED: list[BaseException] = [
    SystemExit(3),
    KeyboardInterrupt("own"),
    GeneratorExit(),
    asyncio.CancelledError(),
    pytest.fail.Exception("no"),
    pytest.skip.Exception("later"),
    type("Odd", (BaseException,), {})("odd"),
    StopIteration(7),
    ValueError("usual"),
]
ORDINARY = (UserCodeError, RuntimeError, StopIteration, ValueError)
each = pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Ctrl-C is handled, as in a runner, so a KeyboardInterrupt is of the user's code."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


def kinds(error: BaseException) -> list[Callable[[], Any]]:
    """Functions that raise an error: sync, async, in a returned coroutine, in a future."""

    def plainly() -> None:
        raise error

    async def at_once() -> None:
        raise error

    async def in_a_future() -> None:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, error)
        await future

    futures = [] if isinstance(error, StopIteration) else [in_a_future]  # Python refuses it
    return [plainly, at_once, lambda: at_once(), *futures]


@each
async def test_a_call_raises_an_ordinary_exception(error: BaseException) -> None:
    for function in kinds(error):
        with pytest.raises(ORDINARY) as raised:
            await user_code.call(function)
        await asyncio.sleep(0)  # the caller's task goes on
        if not isinstance(error, StopIteration):  # which Python itself makes a RuntimeError
            assert type(user_code.cause_of(raised.value)) is type(error)
            assert user_code.text_of(raised.value).startswith(type(error).__name__)


@each
def test_a_block_raises_an_ordinary_exception(error: BaseException) -> None:
    with pytest.raises(ORDINARY) as raised, user_code.contained():
        raise error
    assert user_code.cause_of(raised.value) is error


async def test_a_call_ends_with_its_caller() -> None:
    ended, hangs = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        try:
            await hangs.wait()
        finally:
            ended.set()

    for limit in (0.01, 0.0):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(limit):
                await user_code.call(endless)
    assert ended.is_set()


def test_ctrl_c_at_the_terminal_passes() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), user_code.contained():
        signal.raise_signal(signal.SIGINT)


def test_a_message_that_raises() -> None:
    class Broken(BaseException):
        def __str__(self) -> str:
            raise SystemExit

    with pytest.raises(UserCodeError, match="Broken: "), user_code.contained():
        raise Broken


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("own")])
def test_a_loop_outlives_tasks_and_callbacks(error: BaseException) -> None:
    async def ends() -> None:
        raise error

    def calls_back(_: object) -> None:
        raise error

    async def main() -> str:
        loop = asyncio.get_running_loop()
        loop.call_soon(calls_back, None)
        first, second = loop.create_task(ends()), loop.create_task(asyncio.sleep(0.01, "goes on"))
        with pytest.raises(type(error)):
            await first
        second.add_done_callback(calls_back)
        return await second

    with asyncio.Runner(loop_factory=UserCodeLoop) as runner:
        assert runner.run(main()) == "goes on"
        with pytest.raises(type(error)):  # of the program itself
            runner.run(ends())
