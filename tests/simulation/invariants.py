"""The invariants of a simulated run, checked after every commit and at the end."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from agentrl.algorithms.model import digests
from agentrl.algorithms.sampling.tasks import group_number
from agentrl.core.errors import DamagedError
from agentrl.runners.feedback import session_group
from agentrl.runners.sessions import SESSION_LEASE
from tests.simulation import actors
from tests.simulation.loop import Process, Violation

if TYPE_CHECKING:
    from tests.simulation.world import World


def check(holds: object, why: str) -> None:
    if not holds:
        raise Violation(why)


LEASES = "select id, lease_until, lease, runner, rollout_id from attempts where state = 'running'"
LATE = """select t.id from transitions t join attempts a on a.id = t.attempt_id
    where t.late = 1 and a.state = 'succeeded'"""
ANSWERS = """select t.answer from rollouts r join transitions t on t.attempt_id = r.attempt_id
    where t.late = 0 and t.repeats is null and (r.group_id = ? or r.group_id like ?)
    order by t.seq"""
NAME = "run"
SLOTS, LEASE = 2, 9.0  # slots of a runner; seconds of its lease, unlike those of all others
GROUPS = f"""select id, state, claimed_epoch, trained_step, pending from groups
    where run_id = '{NAME}'"""
RUN = f"select epoch, step, checkpoint from runs where id = '{NAME}'"
COUNTED = """select r.id, r.queued, r.running, r.groups_open, r.groups_settled,
    (select count(*) from rollouts o where o.run_id = r.id and o.state = 'queued'),
    (select count(*) from rollouts o where o.run_id = r.id and o.state = 'running'),
    (select count(*) from groups g where g.run_id = r.id and g.purpose = 'train'
        and g.state = 'open'),
    (select count(*) from groups g where g.run_id = r.id and g.purpose = 'train'
        and g.state in ('settled', 'claimed'))
    from runs r"""
PENDING = """select g.id, g.pending, count(r.id) from groups g
    left join rollouts r on r.group_id = g.id and r.state in ('queued', 'running')
    group by g.id having g.pending != count(r.id)"""


REFUSED = """select 'rollout', id from rollouts where id like 'odd%'
    union all select 'call', id from transitions where id = 'odd'
    union all select 'document', key from documents where key = 'odd'
    union all select 'data set', name from datasets where name = 'odd'"""


class Invariants:
    def __init__(self, world: World) -> None:
        self.world = world
        self.epochs: dict[int, int] = {}  # process id -> the epoch in which it owns the run
        self.groups: dict[str, Any] = {}
        self._rows: list[Any] = []  # of groups, as they were read
        self.run: Any = None
        self.leases: dict[str, Any] | None = {}  # of attempts; None: not known
        self.steps = 0  # the most steps that the run ever had
        self.too_early: set[str] = set()  # groups that had been requested when the run was rewound

    def open(self) -> None:
        path = self.world.folder / "store.db"
        self.conn = sqlite3.connect(path, isolation_level=None, cached_statements=64)

    def forget(self) -> None:
        """Forget what was read: a power cut has restored an earlier state."""
        self.groups, self._rows, self.run, self.epochs, self.leases = {}, [], None, {}, None

    def began(self, process: Process, epoch: int) -> None:
        """A process has opened the run."""
        others = [pid for pid, other_epoch in self.epochs.items() if other_epoch == epoch]
        check(not others, f"{process} has epoch {epoch}, which another process has already")
        self.epochs[process.pid] = epoch

    def owns(self, process: Process) -> bool:
        """Whether a process that has opened the run still owns it. Even the newest process may not:
        one that was suspended before it opened the run may have taken it over since."""
        return self.run is None or self.epochs.get(process.pid) == self.run[0]

    def claimed_by(self, runner: str) -> set[str]:
        """The living attempts of a runner."""
        return {row[0] for row in self.conn.execute(LEASES) if row[3] == runner}

    def close(self) -> None:
        self.conn.close()

    def after_commit(self, process: Process) -> None:
        try:
            self._look(process)
        except Violation as violation:
            self.world.loop.failures.append((process, violation))

    def _look(self, process: Process) -> None:
        self._check_attempts()
        run = self.conn.execute(RUN).fetchone()
        if run is None:
            return
        group_rows = self.conn.execute(GROUPS).fetchall()
        if group_rows == self._rows and run == self.run:
            return
        rows = {row[0]: row for row in group_rows}
        self._check_groups(process, run, rows)
        self.run, self.groups, self._rows = run, rows, group_rows
        self._note_too_early(run[1], rows)

    def _note_too_early(self, steps: int, groups: Collection[str]) -> None:
        """Note groups that only a rewound step can have requested: they are played with weights
        that are older than the bound."""
        self.steps, shape = max(self.steps, steps), self.world.schedule.shape
        if steps < self.steps and not shape.live:
            ahead = (steps + 1) * shape.groups + int(shape.staleness * shape.groups)
            self.too_early |= {
                id for id in groups if "/train/g" in id and group_number(id) >= ahead
            }

    def _check_attempts(self) -> None:
        """A rollout has at most one living attempt, a lease that has ended is not renewed, and a
        claim returns no more rollouts than it asked for."""
        leases_before, lease_rows = self.leases, self.conn.execute(LEASES).fetchall()
        if leases_before is not None and lease_rows == [*leases_before.values()]:
            return
        leases = self.leases = {row[0]: row for row in lease_rows}
        rollouts = Counter(row[4] for row in leases.values())
        for rollout, count in rollouts.items():
            check(count == 1, f"rollout {rollout} has {count} living attempts")
        if leases_before is None:
            return
        for id, row in leases.items():
            before = leases_before.get(id)
            if before is None or before == row:
                continue
            renewed = row[2] == LEASE and row[1] > before[1]
            late = renewed and before[1] <= row[1] - LEASE
            check(not late, f"attempt {id} is renewed after its lease had ended")
        new = Counter(row[3] for id, row in leases.items() if id not in leases_before)
        for runner, count in new.items():
            check(count <= SLOTS, f"{runner} has claimed {count} rollouts at once, not {SLOTS}")

    def _check_groups(self, process: Process, run: Any, rows: dict[str, Any]) -> None:
        epoch = run[0]
        own_epoch = self.epochs.get(process.pid)
        for id, row in rows.items():
            before = self.groups.get(id)
            if before == row:
                continue
            state = row[1]
            if before is None or before[1] != state:
                of = f" by epoch {row[2]}" if state == "claimed" else ""
                self.world.say(f"{process}: {id} is {state}{of}")
            check(row[4] >= 0, f"group {id} waits for {row[4]} rollouts")
            if state == "claimed" and (before is None or before[2] != row[2]):
                check(row[2] == epoch, f"group {id} is claimed by epoch {row[2]}, not {epoch}")
                check(
                    own_epoch in (None, epoch), f"{process} of epoch {own_epoch} claimed group {id}"
                )
            if before is not None and before[1] in ("trained", "discarded"):
                check(run[1] < self.run[1], f"group {id} was {before[1]} and is {state}")
            if state in ("trained", "discarded") and before is not None:
                check(before[1] == "claimed", f"group {id} was {before[1]} and is {state}")
                check(before[2] == epoch, f"group {id} of epoch {before[2]} is {state} by {epoch}")
                check(
                    own_epoch in (None, epoch), f"{process} of epoch {own_epoch} trained group {id}"
                )
        for id in self.groups.keys() - rows.keys():
            check(run[1] < self.run[1], f"group {id} is lost")  # a rewind forgets pruned ones
        started = self.world.started["algorithm"] + self.world.started["learner"]
        check(epoch <= started, f"{started} processes have opened the run {epoch} times")
        if self.run is None or run[0] != self.run[0]:
            self.world.say(f"{process}: epoch {run[0]} begins")
        if self.run is not None and run[1] != self.run[1]:
            self.world.say(f"{process}: the run has {run[1]} steps, checkpoint {run[2]}")
            check(
                own_epoch in (None, epoch),
                f"{process} of epoch {own_epoch} committed step {run[1]}",
            )
            self._check_checkpoint(run)

    def _check_checkpoint(self, run: Any) -> None:
        """The checkpoint that the run names is whole, and has exactly the committed steps; a large
        one may lack the last step, during which it was written."""
        if run[2] is None:
            return
        path = self.world.folder / "out" / run[2] / "state.json"
        check(path.exists(), f"the run names the checkpoint {run[2]}, which is not there")
        fold = json.loads(path.read_text())["state"]["fold"]
        trained, steps = self._trained(), [*fold["steps"]]
        behind = len(trained) - len(steps) if self.world.schedule.shape.large else 0
        check(
            behind <= 1 and steps == trained[: len(trained) - behind],
            f"checkpoint {run[2]} was trained on {steps}, and the store has {trained}",
        )

    def after_power_cut(self) -> None:
        """The checkpoint that the run names was synced before the power cut."""
        run = self.conn.execute(RUN).fetchone()
        if run is not None and run[2] is not None and run[2] not in self.world.damaged:
            try:
                digests.check(self.world.folder / "out" / run[2])
            except DamagedError as error:
                raise Violation(f"after a power cut: {error}") from None

    def _trained(self) -> list[list[str]]:
        by_step: dict[int, list[str]] = {}
        for id, step in self.conn.execute(
            "select id, trained_step from groups where run_id = ? and state = 'trained' order by 1",
            (NAME,),
        ):
            by_step.setdefault(step, []).append(id)
        return [by_step[step] for step in sorted(by_step)]

    def at_end(self) -> None:
        self._look(self.world.system.kernel)
        self.check_counters(self.conn)
        stored = self.conn.execute(REFUSED).fetchone()
        check(stored is None, f"the store has what it refused: {stored}")
        shape = self.world.schedule.shape
        if shape.live:
            self._check_sessions()
            return
        run = self.conn.execute(RUN).fetchone()
        check(run[1] == shape.steps, f"the run has {run[1]} steps")
        states = [row[1] for row in self.groups.values()]
        wanted = (shape.steps - (shape.empty is not None)) * shape.groups
        check(states.count("trained") == wanted, f"groups at the end: {states}")
        self._check_calls()
        world = self.world
        wanted = actors.expected(world.config, world.tasks, shape.empty)
        digest = self._digest(run)
        check(digest == wanted, f"the weights at the end are {digest}, undisturbed {wanted}")

    def check_counters(self, conn: sqlite3.Connection) -> None:
        """The counters of each run match its rows: admission and readiness depend on them."""
        for run, *numbers in conn.execute(COUNTED):
            counters, counted = numbers[:4], numbers[4:]
            check(counters == counted, f"run {run} counts {counters}, its rows are {counted}")
        for group, pending, unfinished in conn.execute(PENDING):
            check(False, f"group {group} waits for {pending} rollouts, {unfinished} are to come")

    def _check_sessions(self) -> None:
        """Every session is trained once and whole: its calls are the answers that its user read.
        Calls of a session whose lease was ended by the clock may not be recorded."""
        leased = self.world.system.lost_time < SESSION_LEASE
        states = {row[1] for row in self.groups.values()}
        check(states == {"trained"}, f"sessions at the end are {states}")
        late = self.conn.execute(LATE).fetchone()
        check(
            late is None or not leased,
            f"call {late and late[0]} came after its session was settled",
        )
        for name, heard in self.world.heard.items():
            stored = self._answers(name)
            for text in heard:
                wanted = {1} if leased else {0, 1}
                check(stored.count(text) in wanted, f"{name} heard {text!r}, stored are {stored}")
            cut = self.world.cut.get(name)
            held = cut is None or not leased or any(text.startswith(cut) for text in stored)
            check(held, f"{name} read {cut!r} of its last answer, stored are {stored}")

    def _answers(self, session: str) -> list[str]:
        """The stored answers of a session."""
        group = session_group(NAME, session)
        rows = self.conn.execute(ANSWERS, (group, f"{group}-%"))
        return [json.loads(answer)["content"] for (answer,) in rows]

    def forget_unstored_cuts(self) -> None:
        """A killed gateway loses an unstored answer whose user did not wait for its end: no other
        process had all of it."""
        for session, cut in [*self.world.cut.items()]:
            if not any(text.startswith(cut) for text in self._answers(session)):
                del self.world.cut[session]

    def _digest(self, run: Any) -> str:
        path = self.world.folder / "out" / run[2] / "state.json"
        fold = json.loads(path.read_text())["state"]["fold"]
        return f"{fold['digest']}/{fold['reference']}"

    def _check_calls(self) -> None:
        """The calls of a trained rollout are those whose answers its agent got, in order."""
        query = """select r.id, r.result, t.logprobs, t.version, g.trained_step, t.id, g.id
            from rollouts r join groups g on g.id = r.group_id
            join transitions t on t.attempt_id = r.attempt_id
            where t.late = 0 and g.state = 'trained' and g.run_id = ?
            order by r.id, t.position"""
        stored: dict[str, list[int]] = {}
        results: dict[str, Any] = {}
        for rollout, result, logprobs, version, step, call, group in self.conn.execute(
            query, (NAME,)
        ):
            results[rollout] = result
            number = round(-array("f", logprobs)[0] * 2**20)
            stored.setdefault(rollout, []).append(number)
            lag = step - version
            # A suspended owner that wakes answers with its older weights until gateways hear of the
            # new one, and after a rewind groups of later steps are played with earlier weights;
            # `step.Updater.build` withholds such tokens, which the stand-in does not.
            held = lag <= self.world.schedule.shape.staleness or group in self.too_early
            held |= number in self.world.of_former_owners
            check(held and lag >= 0, f"call {call} of version {version} is trained in step {step}")
        for rollout, numbers in stored.items():
            result = json.loads(results[rollout] or "null")
            check(result is not None, f"{rollout} is trained, but has no result")
            heard = result["serials"]
            check(heard == numbers, f"{rollout}: its agent heard {heard}, stored are {numbers}")
        all_numbers = [number for numbers in stored.values() for number in numbers]
        check(len(set(all_numbers)) == len(all_numbers), "an answer is stored as two calls")
