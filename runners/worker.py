"""Claims rollouts, runs an attempt of each and stores its outcome.

Owns: one task for each attempt in progress, at most `concurrency` of them running an agent. With
`prepare` more are claimed ahead; with `score` attempts leave their slot after their run.
Invariant: an attempt ends in exactly one way: its outcome is stored; the worker, told to stop,
returns it to the queue because it did not end within `drain`; or its lease expires. An attempt that
has lost its lease is stopped and its outcome discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from msgspec.structs import replace

from agentrl.config import RunnerConfig
from agentrl.errors import Invalid, StoreError
from agentrl.runners.execution import AttemptRunner, Stages
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.types import Attempt, ErrorKind, Failure, Outcome

log = logging.getLogger("agentrl.runner")
CLAIM_TIMEOUT = 1.0  # seconds that one `claim` waits on the store, hence the delay of a stop
# Seconds past its deadline until the lease of a hung attempt is no longer renewed.
LEASE_GRACE = 5.0


class Worker:
    """Runs attempts of one run in this process."""

    def __init__(
        self,
        run: str,
        execution: AttemptRunner,
        config: RunnerConfig,
        *,
        name: str,
        on_blocked: Callable[[str], None] | None = None,
    ) -> None:
        """Calls `on_blocked(rollout)` on the gateway's thread when an async agent blocks the event
        loop past its time-out."""
        self.run_name, self.config, self.name = run, config, name
        self.on_blocked = on_blocked
        self._execution = execution
        self._store, self._gateway = execution.store, execution.gateway
        limit = execution.executor.limit
        slots = config.concurrency if limit is None else min(limit, config.concurrency)
        self._running: dict[str, tuple[asyncio.Task[None], ActiveAttempt]] = {}
        self._being_stored: dict[str, asyncio.Task[None]] = {}  # ended, outcome not yet stored
        self._outcomes: list[Outcome] = []
        self._finishing = asyncio.Lock()
        self._failed: BaseException | None = None
        self._stopped = False
        self._changed = asyncio.Event()  # a slot is free, or it is time to stop
        self._stages = Stages(config, slots, self._changed.set)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, wait up to `drain` seconds for running attempts, then return
        the unfinished ones to the queue.

        Raises StoreError if the store fails permanently."""
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self._changed.set())
        home = asyncio.get_running_loop()
        leases = self._gateway.spawn(self._keep_leases(home))
        leases.add_done_callback(lambda ended: home.call_soon_threadsafe(self._note_failure, ended))
        try:
            while not stop.is_set() and self._failed is None:
                await self._claim_and_start(stop)
            running = [task for task, _ in self._running.values()]
            if running and self._failed is None:
                await asyncio.wait(running, timeout=self.config.drain)
        finally:
            self._stopped = True
            stopping.cancel()
            try:
                await self._abandon()
            finally:
                leases.cancel()
        if self._failed:
            raise self._failed

    async def _claim_and_start(self, stop: asyncio.Event) -> None:
        self._changed.clear()
        free = self._stages.free
        if free <= 0:
            await self._changed.wait()
            return
        if not self._gateway.router.ready:
            # The trainer is starting: attempts would time out without a policy server.
            cursor = await self._store.cursor()
            if not await self._store.policies(self.run_name):
                await self._store.wait(cursor, timeout=CLAIM_TIMEOUT)
                return
        name, lease, run = self.name, self.config.lease, self.run_name
        attempts = await self._store.claim(
            free, runner=name, lease=lease, run=run, timeout=CLAIM_TIMEOUT
        )
        if stop.is_set():
            await self._give_back(attempts)
            return
        for attempt in attempts:
            active = self._gateway.register(attempt, sealed=self._execution.executor.sealed)
            self._stages.enter(attempt)
            task = asyncio.create_task(self._attempt(active), name=f"attempt-{active.id}")
            self._running[active.id] = task, active
            task.add_done_callback(self._note_failure)

    async def _attempt(self, active: ActiveAttempt) -> None:
        try:
            outcome = await self._execution.run(active, self._stages)
        finally:
            task, _ = self._running.pop(active.id)
            self._stages.leave(active.id)
            self._changed.set()
        self._being_stored[active.id] = task  # its slot is free; its lease is still renewed
        try:
            await self._end(outcome)
        finally:
            del self._being_stored[active.id]

    async def _end(self, outcome: Outcome) -> None:
        """Store an outcome, in one batch with others that arrive during the previous write."""
        self._outcomes.append(outcome)
        async with self._finishing:
            if self._outcomes:  # else another attempt has stored this outcome
                outcomes, self._outcomes = self._outcomes, []
                await self._finish(outcomes)

    async def _finish(self, outcomes: Sequence[Outcome]) -> None:
        """Store outcomes; an invalid one fails only its own attempt."""
        try:
            await self._store.finish(outcomes)
        except Invalid as error:
            if len(outcomes) == 1:
                refused = outcomes[0]
                log.warning(
                    "the outcome of attempt %s cannot be stored: %s", refused.attempt, error
                )
                failure = refused.failure or Failure(kind=ErrorKind.AGENT, message=str(error))
                empty = replace(refused, result=None, rewards=[], spans=[], failure=failure)
                await self._store.finish([empty])
                return
            for outcome in outcomes:
                await self._finish([outcome])

    def _note_failure(self, ended: asyncio.Task[None] | Future[None]) -> None:
        """Stop the worker after an unexpected error of an attempt or the heartbeat."""
        failed: BaseException | None = None
        if not ended.cancelled():
            failed = ended.exception()
        elif isinstance(ended, Future) and not self._stopped:
            failed = RuntimeError("the gateway has ended, and the heartbeat with it")
        if failed is not None:
            self._failed = self._failed or failed
            self._changed.set()

    async def _abandon(self) -> None:
        """Stop the running attempts, then return them to the queue: two attempts of a rollout must
        not run at once. Waits `LEASE_GRACE` seconds for agents that ignore cancellation."""
        unfinished = list(self._running.values())
        for task, _ in unfinished:
            task.cancel()
        tasks = {*(task for task, _ in unfinished), *self._being_stored.values()}
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=LEASE_GRACE)
        finally:
            await self._give_back([active.attempt for _, active in unfinished])

    async def _give_back(self, attempts: Sequence[Attempt]) -> None:
        """Return attempts to the queue before their leases expire."""
        failure = Failure(kind=ErrorKind.LOST_RUNNER, message=f"runner {self.name} was stopped")
        outcomes = [
            Outcome(attempt=attempt.id, fence=attempt.fence, failure=failure, retry=True)
            for attempt in attempts
        ]
        if outcomes:
            await self._store.finish(outcomes)

    async def _keep_leases(self, home: asyncio.AbstractEventLoop) -> None:
        """Renew the leases of all attempts, on the gateway's event loop: an agent that blocks the
        worker's loop keeps its lease until its time-out."""
        while True:
            await asyncio.sleep(self.config.lease / 3)
            running = list(self._running.values())
            blocked = [
                active for _, active in running if active.left < -LEASE_GRACE - self.config.lease
            ]
            if blocked and self.on_blocked is not None:
                self.on_blocked(blocked[0].attempt.rollout.id)
            held = [active.id for _, active in running if active.left > -LEASE_GRACE]
            held += list(self._being_stored)
            if not held:
                continue
            try:
                kept = await self._store.heartbeat(held, lease=self.config.lease)
            except StoreError as error:  # if it persists, `claim` raises it
                log.warning("heartbeat failed: %s", error)
                continue
            lost = set(held).difference(kept)
            if lost:
                with contextlib.suppress(RuntimeError):  # the worker's loop is closed
                    home.call_soon_threadsafe(self._stop_lost, sorted(lost))

    def _stop_lost(self, attempts: Sequence[str]) -> None:
        for attempt in attempts:
            if attempt in self._running:
                task, _ = self._running[attempt]
                log.warning("attempt %s lost its lease and is stopped", attempt)
                task.cancel()
