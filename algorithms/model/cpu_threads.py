"""How many threads of torch small models compute with: one or all, as timed, not as assumed.

Threads wait for each other after every operation. On cores that other programs use as well, one of
them is often not running, so a step of a small model takes several times as long with all threads
as with one; on idle cores all are faster. Owns the count and the times of the trial in progress.
Always true: the count is one or a power of two, which with `MKL_CBWR=AUTO,STRICT` give the same
numbers, bit for bit; where that is not promised, nothing is tried and the count is the caller's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from agentrl.processes import PHASE

log = logging.getLogger("agentrl.algorithm")
SMALL = 5_000_000  # parameters; operations of larger models take longer than threads wait
EVERY = 150  # calls from one trial to the next
PAIRS = 3  # of calls in a trial: with one thread, with all
MUCH_SLOWER = 2.0  # times as long as with one thread: a trial ends after its first pair
WORTHWHILE = 0.9  # of the time with one thread: all must take less, for others may use the cores


@dataclass(slots=True)
class ThreadTuner:
    """What work computes with that is done again and again. count: until a trial says otherwise;
    most: tried beside one, 1 where nothing is to be tried; name: of the work, for the line that
    says what was chosen."""

    count: int
    most: int = 1
    name: str = ""
    clock: Callable[[], float] = time.perf_counter
    _until: int = 1  # calls before the next trial; the very first warms up
    _times: list[float] = field(default_factory=list)  # per unit: with one, with all, by turns
    _logged: int = 0

    def computing(self) -> AbstractContextManager[None]:
        """Compute with the best count known."""
        return computing_with(self.count)

    @contextmanager
    def working(self, amount: float = 1.0) -> Iterator[None]:
        """Compute with the best count known, or in a trial with the one that is due, and time it.
        amount: of work, of which calls may have different ones."""
        trying = self.most > 1 and self._until <= 0
        started = self.clock()
        with computing_with((1, self.most)[len(self._times) % 2] if trying else self.count):
            yield
        if trying:
            self._note((self.clock() - started) / max(amount, 1.0))
        else:
            self._until -= 1

    def _note(self, seconds: float) -> None:
        self._times.append(seconds)
        if len(self._times) % 2:
            return
        ratio = sum(self._times[1::2]) / sum(self._times[::2])
        if len(self._times) == 2 * PAIRS or ratio > MUCH_SLOWER:
            self._times, self._until = [], EVERY
            self._choose(self.most if ratio < WORTHWHILE else 1, ratio)

    def _choose(self, count: int, ratio: float) -> None:
        self.count = count
        if self._logged != count:
            self._logged = count
            chosen = "1 thread" if count == 1 else f"{count} threads"
            slower = f"{self.most} take {ratio:.1f} times as long as 1"
            log.log(PHASE, f"{self.name} with {chosen}: {slower}")


def thread_tuner(parameters: int, name: str, otherwise: int) -> ThreadTuner:
    """For a model's work; `otherwise`, and no trial, where their number is not to be touched: a
    large model, or numbers that would depend on it."""
    most = largest_power_of_two(os.cpu_count() or 1)
    if parameters > SMALL or not is_number_free():
        return ThreadTuner(otherwise)
    return ThreadTuner(most, most, name)


def is_number_free() -> bool:
    """Whether this process computes the same with one thread as with a power of two of them: torch
    multiplies with MKL, which was told so (see `agentrl.processes.environment`)."""
    strict = os.environ.get("MKL_CBWR", "").endswith("STRICT")
    return strict and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def largest_power_of_two(most: int) -> int:
    return 1 << (max(1, most).bit_length() - 1)


@contextmanager
def computing_with(number: int) -> Iterator[None]:
    """Compute with so many threads in the calling thread; others keep theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
