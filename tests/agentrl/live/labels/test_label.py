"""Labels: what a session is worth, written once, rewritten by late feedback, safe from a kill."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest

from agentrl.core.config import resolve
from agentrl.core.errors import Invalid
from agentrl.core.types import Reward, StepCommit, StepReward
from agentrl.live import records
from agentrl.live.labels import Labeller
from agentrl.live.records import (
    SOURCE,
    believed,
    is_lost,
    is_ready,
    mark_of,
    oldest_first,
    outcome_of,
)
from agentrl.runners.feedback import Feedback, give_feedback
from agentrl.store import open_store
from tests.agentrl.live.sessions import NOW, RUN, Scripted, ended, row_of


@pytest.fixture
async def store(tmp_path):
    async with open_store(f"sqlite:///{tmp_path}/store.db") as opened:
        await opened.open_run(RUN, {})
        yield opened


def labeller(store, asker=None, clock=lambda: NOW + 60.0, **live):
    config = resolve({"name": RUN, "live": live}, source="test")
    return Labeller(store, config, asker or Scripted(good=1.0, bad=0.0), clock)


async def label(store, asker=None, **live):
    """What a watch does that starts, labels and is killed."""
    one = labeller(store, asker, **live)
    await one.start()
    await one.look()
    await one.settle()
    return one


def labels(row):
    return {(r.name, r.target): r.value for r in row.rewards if r.source == SOURCE}


async def test_a_session_gets_the_mean_of_its_signals_and_its_calls_what_came_next(store):
    id = await ended(store, "s", "q", "a", "no!", "good one", "thanks", "good bye")
    await label(store)
    row = await row_of(store, id)
    mark = mark_of(row)
    assert mark.asked == {"verifier": 1.0, "next_message": 0.5}
    assert mark.delays == {"verifier": 60.0, "next_message": 60.0}
    assert outcome_of(row) == 0.75
    calls = [call.id for call in (await store.calls([id]))[id]]
    assert labels(row) == {
        ("labelled", None): 1.0, ("outcome", None): 0.75,
        ("signal", calls[0]): 0.0, ("signal", calls[1]): 1.0,
    }  # fmt: skip


async def test_weights_are_those_of_the_run_file_and_what_is_missing_is_missing(store, caplog):
    one, two = await ended(store, "a", "q", "good"), await ended(store, "b", "q", "none")
    for name in ("bought", "seen"):
        await give_feedback(store, RUN, Feedback(session="a", name=name, value=0.0))
    with caplog.at_level(logging.WARNING, "agentrl.live"):
        await label(store, signals={"weights": {"verifier": 1.0, "bought": 3.0}})
    assert outcome_of(await row_of(store, one)) == 0.25
    assert math.isnan(outcome_of(await row_of(store, two)))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "under another name than those in live.signals.weights is kept" in line
    assert "seen" not in line  # it may be a user's word


async def test_what_is_labelled_is_asked_about_once_and_written_once(store):
    await ended(store, "a", "q", "good")
    asker = Scripted(good=1.0)
    await label(store, asker)
    before = await store.cursor()
    await label(store, asker)
    assert (len(asker.asked), await store.cursor()) == (1, before)


class Cut(Scripted):
    """A watch that is killed while it asks."""

    def __init__(self, **verified):
        super().__init__(**verified)
        self.begun = asyncio.Event()

    async def verify(self, trace):
        self.begun.set()
        await asyncio.Event().wait()


async def test_a_watch_that_is_killed_while_it_asks_goes_on_with_the_next_start(store):
    id = await ended(store, "a", "q", "good", user="u")
    one = labeller(store, asker := Cut(good=1.0))
    await one.start()
    await one.look()
    await asker.begun.wait()
    for task in one._asking.values():
        task.cancel()
    assert mark_of(await row_of(store, id)) is None
    await label(store)
    assert outcome_of(await row_of(store, id)) == 1.0


class Full:
    """A store whose disk is full for a while."""

    def __init__(self, store):
        self._store, self.full = store, True

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def add_rewards(self, rewards):
        if self.full:
            from agentrl.core.errors import Unavailable

            raise Unavailable("the disk is full")
        await self._store.add_rewards(rewards)


async def test_a_full_disk_loses_no_label(store):
    """The session that could not be written is no repeat of itself afterwards."""
    id = await ended(store, "a", "q", "good", user="u")
    full = Full(store)
    one = labeller(full)
    await one.look()
    with pytest.raises(Exception, match="disk is full"):
        await one.settle()
    full.full = False
    await one.look()
    await one.settle()
    assert outcome_of(await row_of(store, id)) == 1.0


async def test_late_feedback_rewrites_the_outcome_until_the_session_is_trained(store):
    id = await ended(store, "a", "q", "good")
    one = await label(store)
    row = await row_of(store, id)
    assert (is_ready(row, NOW + 9.0, 10.0), is_ready(row, NOW + 10.0, 10.0)) == (False, True)
    await give_feedback(store, RUN, Feedback(session="a", value=0.0))
    await one.look()
    row = await row_of(store, id)
    assert (outcome_of(row), mark_of(row).posted) == (0.5, {"feedback": 0.0})
    assert is_ready(row, NOW, 1e9)  # a user who has said something need not be waited for
    state = await store.run(RUN)
    await store.claim_groups(RUN, state.epoch, 1)
    step = {"step": 0, "versions": {}, "checkpoint": None, "metrics": {}}
    await store.commit_step(StepCommit(run=RUN, epoch=state.epoch, groups=[row.group], **step))
    await give_feedback(store, RUN, Feedback(session="a", value=1.0))
    await one.look()
    row = await row_of(store, id)
    assert outcome_of(row) == 0.5
    assert [r.value for r in row.rewards if r.name == "feedback"] == [1.0]


async def test_a_session_of_which_nothing_is_known_is_lost_after_the_wait(store):
    id = await ended(store, "a", "q", "a")
    one = await label(store)
    row = await row_of(store, id)
    assert math.isnan(outcome_of(row))
    for after in (9.0, -1e9):  # a clock that jumps back makes it wait
        assert not is_lost(row, NOW + after, 10.0)
    assert is_lost(row, NOW + 10.0, 10.0)
    assert not is_ready(row, NOW + 10.0, 10.0)
    await give_feedback(store, RUN, Feedback(session="a", correction="b"))
    await one.look()
    row = await row_of(store, id)
    assert (outcome_of(row), is_lost(row, NOW + 10.0, 10.0)) == (0.0, False)
    assert mark_of(row).posted == {"correction": 0.0}


async def test_sessions_of_a_user_and_day_are_capped_and_repeats_count_once(store):
    first = [await ended(store, f"a{n}", f"q{n}", "good", user="u", at=NOW + n) for n in range(3)]
    again = await ended(store, "again", "q0", "good too", user="u", at=NOW + 3)
    later = await ended(store, "later", "q0", "good", user="u", at=NOW + 86_400)
    other = await ended(store, "other", "q0", "good", user="v", at=NOW + 4)
    nobody = [await ended(store, f"n{n}", "q0", "good", at=NOW + 5) for n in range(3)]
    newer = await ended(store, "new", "q0", "good", user="u", at=NOW + 86_401, version=2)
    asker = Scripted(good=1.0)
    for _ in range(2):  # a restart decides the same
        await label(store, asker, people={"per_user": 2})
    rows = {id: await row_of(store, id) for id in [*first, again, later, other, *nobody, newer]}
    counted = {id for id, row in rows.items() if not math.isnan(outcome_of(row))}
    assert counted == {*first[:2], later, other, *nobody}
    assert "2 others of that day" in mark_of(rows[first[2]]).held
    for id in (again, newer):  # whichever version answered: else each lane would count it
        assert "repeats" in mark_of(rows[id]).held
    assert not {first[2], again, newer} & set(asker.asked)
    assert all(is_lost(rows[id], NOW, 1e9) for id in (first[2], again))


async def test_votes_of_an_outlier_are_held_back_and_it_is_said(store, caplog):
    ids = {}
    for user in ("u1", "u2", "u3", "bad"):
        for n in range(6):
            answer = "good" if n % 2 else "bad"
            name = f"{user}{n}"
            ids[user, n] = await ended(store, name, f"q{n}", answer, user=user)
            honest = float(answer == "good")
            value = 1 - honest if user == "bad" else honest
            await give_feedback(store, RUN, Feedback(session=name, value=value))
    with caplog.at_level(logging.WARNING, "agentrl.live"):
        one = await label(store)
        await one.look()
    for (user, n), id in ids.items():
        row = await row_of(store, id)
        assert outcome_of(row) == float(n % 2), (user, n)
        assert bool(mark_of(row).ignored) == (user == "bad")
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert "votes of user bad are held back: its votes are 1.00 from" in said[0]


class Raises(Scripted):
    """Cannot ask about sessions with some words."""

    async def judge(self, replies, subject):
        if any("CANARY" in str(reply.messages) for reply in replies):
            raise KeyError("CANARY")
        return await super().judge(replies, subject)


class Refuses:
    """A store that refuses rewards of a rollout, or of a name."""

    def __init__(self, store, rollout="", name=""):
        self._store, self.rollout, self.name = store, rollout, name

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def add_rewards(self, rewards):
        if any(row.rollout == self.rollout or row.reward.name == self.name for row in rewards):
            raise Invalid("it cannot be stored")
        await self._store.add_rewards(rewards)


async def test_a_session_that_cannot_be_labelled_is_held_and_no_other_waits_for_it(store, caplog):
    bad = await ended(store, "bad", "CANARY", "good", "thanks", "bye", at=NOW - 1)
    good = await ended(store, "good", "q", "good", "thanks", "bye")
    asker = Raises(good=1.0)
    with caplog.at_level(logging.WARNING, "agentrl.live"):
        one = await label(store, asker)
        one.failed()
    row = await row_of(store, bad)
    assert "cannot be labelled: KeyError (" in mark_of(row).held
    assert "test_label.py" in mark_of(row).held
    assert is_lost(row, NOW, 1e9)
    assert not is_ready(row, NOW + 1e9, 0.0)
    assert outcome_of(await row_of(store, good)) == 1.0
    (line,) = [record.getMessage() for record in caplog.records]
    assert row.group in line
    assert "CANARY" not in line
    before = await store.cursor()
    await one.look()
    await one.settle()
    assert await store.cursor() == before


async def test_a_label_that_cannot_be_stored_holds_its_session_or_is_given_up(store):
    bad = await ended(store, "bad", "q", "good", at=NOW - 1)
    good = await ended(store, "good", "q2", "good")
    await label(Refuses(store, name="outcome"))
    assert "Invalid" in mark_of(await row_of(store, bad)).held
    assert is_lost(await row_of(store, good), NOW, 1e9)
    never, last = [await ended(store, name, name, "good") for name in ("never", "last")]
    refuses, asker = Refuses(store, rollout=never), Scripted(good=1.0)
    one = labeller(refuses, asker)
    for _ in range(2):
        await one.look()
        await one.settle()
        one.failed()
    assert outcome_of(await row_of(store, last)) == 1.0
    assert len(asker.asked) == len(set(asker.asked))


async def test_a_damaged_mark_or_end_stops_nobody(store):
    bad = await ended(store, "bad", "q", "good", at="yesterday")
    odd = await ended(store, "odd", "q1", "good")
    note = '{"ended": "never"}'
    mark = Reward(name="labelled", value=1.0, source=SOURCE, note=note)
    await store.add_rewards([StepReward(rollout=odd, reward=mark)])
    good = await ended(store, "good", "q2", "good")
    await label(store)
    assert mark_of(await row_of(store, odd)).held == "its mark is damaged"
    assert is_lost(await row_of(store, odd), NOW, 1e9)
    for id in (bad, good):
        assert outcome_of(await row_of(store, id)) == 1.0
    assert mark_of(await row_of(store, bad)).ended == NOW + 60.0


async def test_what_is_known_is_read_once_and_forgotten_when_it_is_old(store, monkeypatch):
    """The memory of a watch depends on the last month, not on the age of the run."""
    for n in range(40):
        at = NOW + 86_400 * n
        await ended(store, f"s{n}", f"q{n}", "good", user=f"u{n}", at=at)
    await label(store)
    rows = oldest_first(await store.rollouts(RUN))

    async def newest_first(store, run):
        for row in reversed(rows):
            yield row

    for order in (records.all_sessions, newest_first):
        monkeypatch.setattr(records, "all_sessions", order)
        again = labeller(store)
        await again.start()
        assert len(again._ledger.days) == 3
        assert len(again._ledger.users) == 33


class Polite(Scripted):
    """A verifier of several signals."""

    async def verify(self, trace):
        return {"verifier": 0.0, "polite": 0.0}


async def test_nobody_can_post_what_the_verifier_says(store):
    id = await ended(store, "a", "q", "good")
    await give_feedback(store, RUN, Feedback(session="a", name="polite", value=1.0))
    await label(store, Polite(), signals={"weights": {"polite": 5.0}})
    assert outcome_of(await row_of(store, id)) == 0.0


async def test_what_is_posted_under_other_names_reaches_no_algorithm(store):
    """A preset may take it for its own: "demonstrated" marks calls to be imitated."""
    id = await ended(store, "a", "q", "good")
    for name in ("feedback", "demonstrated"):
        said = Feedback(session="a", name=name, value=1.0, call=0, correction="evil")
        await give_feedback(store, RUN, said)
    await label(store)
    row = await row_of(store, id)
    names = {r.name for r in believed(row, ["feedback"]).rewards}
    assert names == {"labelled", "outcome", "feedback"}
    assert "demonstrated" in {r.name for r in row.rewards}  # it is kept
