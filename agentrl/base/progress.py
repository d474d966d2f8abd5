"""Lines on the console while work goes on that takes more than a few seconds, and durations."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl.base.processes import log_phase

INTERVAL = 5.0  # seconds between lines
_reported = [0.0]  # when `steps_left` last told of this process's work, which says more


def steps_left(
    log: logging.Logger, what: str, total: int, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[int], None]:
    """A function that is called with the number of steps done so far. Every INTERVAL seconds it
    logs their share, and about how many seconds are left."""
    started = said = clock()

    def report(done: int) -> None:
        nonlocal said
        now = clock()
        if now - said < INTERVAL or not 0 < done < total:
            return
        said = now
        _reported[0] = time.monotonic()
        left = (now - started) / done * (total - done)
        log_phase(log, f"{what}: {done / total:.0%} done, about {left:.0f} s left")

    return report


@contextmanager
def still_at(log: logging.Logger, what: str, interval: float = 2 * INTERVAL) -> Iterator[None]:
    """Log that work of unknown length goes on, every `interval` seconds."""
    ended, started = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(interval):
            now = time.monotonic()
            if now - _reported[0] > interval:
                log_phase(log, f"{what}: {now - started:.0f} s so far")

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def lasting(seconds: float) -> str:
    """A duration in the largest unit that it has two of."""
    units = {"days": 86_400, "h": 3600, "min": 60}
    unit = next((name for name, size in units.items() if seconds >= 2 * size), "s")
    return f"{seconds / units.get(unit, 1):.0f} {unit}"
