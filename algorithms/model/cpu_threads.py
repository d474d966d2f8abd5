"""The number of torch threads for small models: one or all, whichever is measured to be faster.

Threads synchronise after every operation. On cores shared with other programs one of them is often
not running, and a step of a small model takes several times as long with all threads as with one;
on idle cores all are faster. Invariant: the number is one or a power of two, which give bitwise
equal results with `MKL_CBWR=AUTO,STRICT`; without that setting it is the caller's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

log = logging.getLogger("agentrl.algorithm")
SMALL_MODEL = 5_000_000  # parameters; synchronisation is negligible in larger models
MOST_SAMPLING = 8  # threads that a decoding step, whose products are small, can use
CALLS_BETWEEN_TRIALS = 150  # calls between trials
PAIRS_PER_TRIAL = 3  # pairs of calls per trial: one thread, all threads
MUCH_SLOWER = 2.0  # time ratio all / one above which a trial ends after its first pair
WORTHWHILE_RATIO = 0.9  # time ratio below which all threads are used: other programs need cores too


@dataclass(slots=True)
class ThreadTuner:
    """Chooses the number of threads for repeated work. count: the current choice. most: the number
    compared with one thread; 1 for no trials. name: the work, for the log."""

    count: int
    most: int = 1
    name: str = ""
    clock: Callable[[], float] = time.perf_counter
    _until: int = 1  # calls before the next trial; the first call warms up
    _times: list[float] = field(default_factory=list)  # per unit of work: one, all, one, all ...
    _logged: int = 0

    def computing(self) -> AbstractContextManager[None]:
        """Compute with the current choice."""
        return computing_with(self.count)

    @contextmanager
    def working(self, amount: float = 1.0) -> Iterator[None]:
        """Compute with the current choice, or in a trial alternately with one and all threads, and
        measure the time per `amount` of work."""
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
        if len(self._times) == 2 * PAIRS_PER_TRIAL or ratio > MUCH_SLOWER:
            self._times, self._until = [], CALLS_BETWEEN_TRIALS
            self.count = self.most if ratio < WORTHWHILE_RATIO else 1
            if self._logged != self.count:
                self._logged = self.count
                chosen = "1 thread" if self.count == 1 else f"{self.count} threads"
                slower = f"{self.most} take {ratio:.1f} times as long as 1"
                log.info("%s with %s: %s", self.name, chosen, slower)


def thread_tuner(parameters: int, name: str, otherwise: int) -> ThreadTuner:
    """A tuner for the work of a model. Without trials, always `otherwise` threads, for a large
    model and if results would depend on the number of threads."""
    most = largest_power_of_two(os.cpu_count() or 1)
    # See `agentrl.base.processes.environment`.
    strict = os.environ.get("MKL_CBWR", "").endswith("STRICT")
    if parameters > SMALL_MODEL or not strict or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return ThreadTuner(otherwise)
    return ThreadTuner(most, most, name)


def sampling_threads(parameters: int) -> int:
    """The number of threads that sample from a model, if no number is set."""
    if parameters <= SMALL_MODEL:
        return 1
    return largest_power_of_two(min(os.cpu_count() or 1, MOST_SAMPLING))


def largest_power_of_two(most: int) -> int:
    return 1 << (max(1, most).bit_length() - 1)


@contextmanager
def computing_with(number: int) -> Iterator[None]:
    """Set the number of torch threads of the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
