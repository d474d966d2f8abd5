"""The simulated computer: an event loop in virtual time, processes, and threads (greenlets).

Owns: the time, the order of all events, and the random generator that chooses it. A process has
lanes, one for each of its threads; a lane runs its callbacks in order, as a real event loop or
thread does, and the seed decides which lane runs next, and for how many callbacks. Time passes only
while nobody can run. Invariant: a run is a function of its seed; a killed process executes nothing
more, not even a `finally`, as its tasks and threads are kept until the simulation has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from heapq import heappop, heappush
from queue import Empty
from time import sleep as real_sleep
from types import SimpleNamespace
from typing import Any

import greenlet

LANE: contextvars.ContextVar[Lane] = contextvars.ContextVar("lane")
LONGEST_SLICE = 4  # callbacks that a lane runs before another may


class Violation(Exception):
    """An invariant does not hold."""


class Stuck(Exception):
    """Nobody can run, now or later."""


class Process:
    """A process, which a kill ends. `frozen_until`: time until which it is suspended."""

    def __init__(self, loop: SimulatedLoop, name: str, pid: int) -> None:
        self.loop, self.name, self.pid = loop, name, pid
        self.alive, self.frozen_until = True, 0.0
        self.tasks: list[Any] = []  # that it has begun
        self.threads: set[Thread] = set()
        self.idle: list[PoolThread] = []  # of its pools
        self.unexecuted: list[Any] = []  # what it would have executed
        self.owned: list[Callable[[], None]] = []  # frees what the kernel frees at its end
        self.main = Lane(self)
        self.context = contextvars.Context()
        self.context.run(LANE.set, self.main)

    def start(self, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.loop.create_task(main, context=self.context.copy())

    def __repr__(self) -> str:
        return self.name


class Lane:
    __slots__ = ("listed", "process", "queue")

    def __init__(self, process: Process) -> None:
        self.process, self.queue, self.listed = process, deque[Any](), False


class Callback:
    """In place of asyncio's handles, without what they keep for debugging. `when`: of a timer."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "lane", "time")

    def __init__(self, callback: Any, args: Any, context: Any, time: float = 0.0) -> None:
        self.callback, self.args, self.context, self.time = callback, args, context, time
        self.lane: Lane | None = context.get(LANE)
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.callback = self.args = None

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.time


class SimulatedTask(asyncio.Task[Any]):
    """Hashed by its number, so that the order of sets is the same in every run."""

    def __init__(self, coro: Any, *, loop: Any, **more: Any) -> None:
        self.number = loop.next_number()
        super().__init__(coro, loop=loop, **more)
        context = more.get("context")
        lane = (context.get(LANE) if context is not None else None) or LANE.get(None)
        self.process = lane.process if lane else None
        if lane is not None:
            lane.process.tasks.append(self)

    def __hash__(self) -> int:
        return int(self.number)


class SimulatedFuture(asyncio.Future[Any]):
    def __init__(self, *, loop: Any) -> None:
        self.number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return int(self.number)


class SimulatedLoop(asyncio.BaseEventLoop):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.now, self.executed = 0.0, 0
        self.random = random.Random(seed)
        self.failures: list[tuple[Process | None, BaseException]] = []
        self.on_event: Callable[[], None] = lambda: None
        self.next_event = 0  # number of executed callbacks at which `on_event` is called
        self.connect: Callable[..., Any] | None = None
        self._heap: list[tuple[float, int, Callback]] = []
        self._lanes: list[Lane] = []  # that have callbacks
        self._parked: list[Lane] = []  # of suspended processes
        self._number = 0
        self.hub = greenlet.getcurrent()
        self.set_task_factory(
            lambda loop, coro, **more: SimulatedTask(coro, loop=loop, **more)  # type: ignore[arg-type]
        )

    def next_number(self) -> int:
        self._number += 1
        return self._number

    # -- what asyncio calls ------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def create_future(self) -> Any:
        return SimulatedFuture(loop=self)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = Callback(
            callback, args, contextvars.copy_context() if context is None else context
        )
        self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        context = contextvars.copy_context() if context is None else context
        timer = Callback(callback, args, context, when)
        heappush(self._heap, (when, self.next_number(), timer))
        return timer

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        lane = LANE.get(None)
        error = context.get("exception") or RuntimeError(context.get("message"))
        self.failures.append((lane.process if lane else None, error))

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future, process = self.create_future(), LANE.get().process

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 - as a pool does
                self.call_soon(_settle, future, None, error)
            else:
                self.call_soon(_settle, future, result, None)

        if process.idle:
            process.idle.pop().take(work)
        else:
            PoolThread(work).start()
        return future

    async def create_connection(self, factory: Any, *args: Any, **more: Any) -> Any:
        assert self.connect is not None
        return await self.connect(factory, *args, **more)

    # -- scheduling --------------------------------------------------------------------------------

    def run(self, ended: Callable[[], bool]) -> None:
        """Run until `ended`. Raises Stuck."""
        events._set_running_loop(self)
        try:
            while not ended():
                self._step()
        finally:
            events._set_running_loop(None)

    def _enqueue(self, callback: Callback) -> None:
        lane = callback.lane
        if lane is None or not lane.process.alive:
            return
        lane.queue.append(callback)
        if not lane.listed:
            lane.listed = True
            self._lanes.append(lane)

    def _step(self) -> None:
        heap, lanes = self._heap, self._lanes
        while heap and heap[0][0] <= self.now:
            _, _, timer = heappop(heap)
            if not timer.is_cancelled:
                self._enqueue(timer)
        if not lanes:
            while heap and heap[0][2].is_cancelled:
                heappop(heap)
            if not heap:
                raise Stuck
            self.now = max(self.now, heap[0][0])
            return
        draw = self.random.random
        place = int(draw() * len(lanes))
        lane = lanes[place]
        process = lane.process
        if process.frozen_until > self.now:
            self._unlist(place)
            self._parked.append(lane)
            return
        queue, left = lane.queue, 1 + int(draw() * LONGEST_SLICE)
        while left and queue:
            callback = queue.popleft()
            if callback.is_cancelled:
                continue
            left -= 1
            self.executed += 1
            try:
                callback.context.run(callback.callback, *callback.args)
            except Exception as error:  # noqa: BLE001 - of what is simulated
                self.failures.append((process, error))
            if not process.alive or process.frozen_until > self.now:
                break
        if not queue and place < len(lanes) and lanes[place] is lane:
            self._unlist(place)
            lane.listed = False
        if self.executed >= self.next_event:
            self.on_event()

    def _unlist(self, place: int) -> None:
        last = self._lanes.pop()
        if place < len(self._lanes):
            self._lanes[place] = last

    def clear(self) -> None:
        """Forget all pending callbacks."""
        for lane in (*self._lanes, *self._parked):
            lane.queue.clear()
        self._heap.clear()

    # -- processes ---------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """End a process as `kill -9` does. It is kept, as else its tasks would be closed."""
        process.alive = False
        for lanes in (self._lanes, self._parked):
            for lane in lanes:
                if lane.process is process:
                    process.unexecuted.append(lane.queue)
                    lane.queue = deque()
                    lane.listed = False
            lanes[:] = [lane for lane in lanes if lane.process is not process]
        for free in process.owned:
            free()
        process.owned.clear()

    def freeze(self, process: Process, seconds: float) -> None:
        """Suspend a process, as SIGSTOP or a machine that swaps does."""
        process.frozen_until = max(process.frozen_until, self.now + seconds)
        context = contextvars.Context()
        context.run(LANE.set, Lane(self.kernel))
        self.call_at(process.frozen_until, self._thaw, process, context=context)

    kernel: Process  # its lanes run what belongs to no process

    def _thaw(self, process: Process) -> None:
        if process.frozen_until > self.now:
            return
        woken = [lane for lane in self._parked if lane.process is process]
        self._parked[:] = [lane for lane in self._parked if lane.process is not process]
        self._lanes += woken


def _settle(future: Any, result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


# -- threads ---------------------------------------------------------------------------------------


class Thread:
    """In place of `threading.Thread`: a greenlet, which runs until it waits for something."""

    def __init__(
        self, target: Callable[..., object], name: str = "", args: Any = (), daemon: bool = True
    ) -> None:
        self.process = LANE.get().process
        self.loop, self.name = self.process.loop, name
        self._target, self._args, self._ended = target, args, False
        self._turn, self._blocked, self._woken = 0, False, False
        self._waiting: list[Thread] = []
        self._context = contextvars.Context()
        self._context.run(LANE.set, Lane(self.process))
        self._green = greenlet.greenlet(self._run, self.loop.hub)

    def start(self) -> None:
        self.process.threads.add(self)
        self._green.gr_context = self._context.copy()
        self.loop.call_soon(self._green.switch, context=self._context)

    def is_alive(self) -> bool:
        return not self._ended

    def join(self, timeout: float | None = None) -> None:
        while not self._ended:
            here = current_thread()
            self._waiting.append(here)
            if not here.block(timeout):
                return

    def block(self, timeout: float | None) -> bool:
        """Wait for `wake`; returns False after the timeout. Called by this thread."""
        self._turn += 1
        self._blocked, self._woken, timer = True, False, None
        if timeout is not None:
            timer = self.loop.call_later(timeout, self._resume, self._turn, context=self._context)
        self.loop.hub.switch()
        if timer is not None:
            timer.cancel()
        return self._woken

    def wake(self) -> None:
        if self._blocked and not self._woken:
            self._woken = True
            self.loop.call_soon(self._resume, self._turn, context=self._context)

    def _resume(self, turn: int) -> None:
        if self._blocked and turn == self._turn:
            self._blocked = False
            self._green.switch()

    def _run(self) -> None:
        THREADS[greenlet.getcurrent()] = self
        try:
            self._target(*self._args)
        except Exception as error:  # noqa: BLE001 - a bug of what is simulated
            self.loop.failures.append((self.process, error))
        finally:
            THREADS.pop(greenlet.getcurrent(), None)
            self._ended = True
            self.process.threads.discard(self)
            for thread in self._waiting:
                thread.wake()


class PoolThread(Thread):
    """A thread of a pool, which waits for more work when it has done one."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(self._serve)
        self._work = work

    def take(self, work: Callable[[], None]) -> None:
        self._work = work
        self.wake()

    def _serve(self) -> None:
        while True:
            self._work()
            self.process.idle.append(self)
            self.block(None)


THREADS: dict[Any, Thread] = {}


def current_thread() -> Thread:
    """Raises RuntimeError on an event loop, which nobody may block."""
    thread = THREADS.get(greenlet.getcurrent())
    if thread is None:
        raise RuntimeError("an event loop is blocked")
    return thread


def sleep(seconds: float) -> None:
    """In place of `time.sleep`, also for real threads that run beside the simulation."""
    if threading.current_thread() is threading.main_thread():
        current_thread().block(seconds)
    else:
        real_sleep(seconds)


class Event:
    """In place of `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            thread.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            here = current_thread()
            self._waiting.append(here)
            here.block(timeout)
            if here in self._waiting:
                self._waiting.remove(here)
        return self._set


class Queue:
    """In place of `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: list[Thread] = []

    @classmethod
    def __class_getitem__(cls, item: object) -> type[Queue]:
        return cls

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._waiting.pop(0).wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items:
            here = current_thread()
            self._waiting.append(here)
            here.block(timeout)
            if here in self._waiting:
                self._waiting.remove(here)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()


THREADING = SimpleNamespace(Thread=Thread, Event=Event)


def chained(loop: SimulatedLoop, work: Coroutine[Any, Any, Any], context: Any) -> Future[Any]:
    """Run a coroutine in another lane, as `asyncio.run_coroutine_threadsafe` does."""
    future: Future[Any] = Future()

    def begin() -> None:
        asyncio.futures._chain_future(loop.create_task(work, context=context.copy()), future)  # type: ignore[attr-defined]

    loop.call_soon(begin, context=context)
    return future
