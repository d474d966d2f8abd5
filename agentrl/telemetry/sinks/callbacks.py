"""The callbacks of a `Trainer`: objects of a script or a notebook that follow its run.

One has `on_step`, `on_evaluation` or both: called with the `StepRow` of a step that was committed,
or of a held-out evaluation, whose metrics are `eval/...` and whose step is the number of steps
before it. They are called in order, one at a time, in a thread of this process, while training goes
on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentrl.base import user_code
from agentrl.base.failures import one_line
from agentrl.errors import AgentRLError, TrainingError
from agentrl.store.base import Store
from agentrl.types import StepRow

SCORE = "eval/score"
METHODS = ("on_step", "on_evaluation")


@asynccontextmanager
async def followed(
    store: Store, run: str, callbacks: Sequence[Any]
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Yields what calls them until it is cancelled; afterwards they are called for the rest."""
    new = Followers(store, run, check_callbacks(callbacks))
    await new.call()  # notes what is there already
    yield new.follow
    await new.call()


def check_callbacks(callbacks: Sequence[Any]) -> Sequence[Any]:
    """The same. Raises AgentRLError for an object that nothing would call."""
    for one in callbacks:
        if not any(callable(getattr(one, name, None)) for name in METHODS):
            raise AgentRLError(f"callback {one!r}: it has neither {' nor '.join(METHODS)}")
    return callbacks


class Followers:
    """Calls callbacks for the steps and evaluations of a run, each once, from now on."""

    def __init__(self, store: Store, run: str, callbacks: Sequence[Any]) -> None:
        self._store, self._run, self._callbacks = store, run, callbacks
        self._seen: dict[str, int] | None = None  # the last step of which each method was called

    async def follow(self) -> None:
        """Never returns. Raises TrainingError for an error of a callback."""
        cursor = await self._store.cursor()
        while True:
            await self.call()
            cursor = await self._store.wait(cursor)

    async def call(self) -> None:
        rows = await self._store.steps(self._run) if self._callbacks else []
        news = {
            "on_step": [row for row in rows if row.committed],
            "on_evaluation": [row for row in rows if SCORE in row.metrics],
        }
        if self._seen is None:  # a resumed run: those before were called when they were new
            self._seen = {name: max((r.step for r in of), default=-1) for name, of in news.items()}
        found = [(row.step, name, row) for name, of in news.items() for row in of]
        # The evaluation of a step number is before the step of this number.
        for step, name, row in sorted(found, key=lambda each: (each[0], each[1] == "on_step")):
            if step > self._seen[name]:
                self._seen[name] = step
                for one in self._callbacks:
                    if method := getattr(one, name, None):
                        await self._ask(method, name, one, row)

    async def _ask(self, method: Any, name: str, one: Any, row: StepRow) -> None:
        try:
            await user_code.in_thread(method, row)
        except Exception as error:
            who, cause = f"{type(one).__name__}.{name}", user_code.cause_of(error)
            raise TrainingError(
                f"the callback {who} raised {type(cause).__name__} at step {row.step}: "
                f"{one_line(str(cause))}; training has stopped, and goes on after the last "
                "checkpoint if it is started again"
            ) from error
