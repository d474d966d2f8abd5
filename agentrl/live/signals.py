"""Signals of a session, and how much a session, a signal and a user count.

The signals are what came after each answer, what the user wrote, and the feedback that was posted.
Messages are read in the shapes of OpenAI (`content`, `tool_calls`, role `tool`), Anthropic (blocks
in `content`) and Gemini (`parts`, role `model`).

Invariant: what counts follows from the marks of the sessions before it, in whichever order they are
read; so a restart decides the same. At most `per_user` sessions of a user and day count, and equal
sessions of a user once. Votes of a user that contradict what else is known of its sessions are held
back. A user whose outcomes are unlike all others' counts for less than the median user. Both are
shown by `agentrl live users`. Kept are the sessions of the newest `DAYS` days, and the last
sessions of a user before that if it had one in `STANDING`.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import dropwhile, takewhile
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from agentrl.core.types import (
    CORRECTION,
    FEEDBACK,
    HINDSIGHT,
    INSTRUCTION_ROLES,
    SIGNAL,
    TOLD,
    TURN,
    Json,
    Record,
    Reward,
    Scope,
    Transition,
)
from agentrl.live.records import FAILED, MARK, OUTCOME, Mark
from agentrl.runners.feedback import Feedback

Message = dict[str, Json]
VERIFIER, NEXT_MESSAGE = "verifier", "next_message"  # signals that cannot be posted
ASKED = (VERIFIER, NEXT_MESSAGE)
MAX_NAME_CHARS, MAX_TEXT_CHARS = 100, 2**18  # characters of feedback
ANSWERS = ("assistant", "model")  # roles


class Reply(Record, frozen=True):
    """What followed the answer of one call: the user's next message, results of tools, or both."""

    call: str  # id
    messages: list[Message]  # of the call's request
    answer: Message
    next: list[Message]


def replies(calls: Sequence[Transition]) -> list[Reply]:
    """What came next, for each call whose conversation a later one continues."""
    said = [[m for m in call.messages if m.get("role") not in INSTRUCTION_ROLES] for call in calls]
    keys = [[_key(message) for message in messages] for messages in said]
    found = []
    for i, call in enumerate(calls):
        later = (
            following
            for j in range(i + 1, len(calls))
            if (following := _beyond(call, keys[i], said[j], keys[j]))
        )
        if call.answer is not None and call.repeats is None and (after := next(later, None)):
            found.append(
                Reply(call=call.id, messages=call.messages, answer=call.answer, next=after)
            )
    return found


def _beyond(
    call: Transition, prefix: list[bytes], messages: list[Message], keys: list[bytes]
) -> list[Message]:
    """The messages between the call's answer in a later request and the next answer; empty if the
    request does not continue this answer."""
    if keys[: len(prefix)] != prefix:
        return []
    rest = messages[len(prefix) :]
    if not rest or not _is_answer(rest[0]) or not _same_answer(rest[0], call.answer or {}):
        return []
    return [*takewhile(lambda m: not _is_answer(m), dropwhile(_is_answer, rest))]


def _same_answer(sent: Message, given: Message) -> bool:
    """Whether a message is the answer of a call; agents may leave out its text or reasoning."""
    one, other = (" ".join(text_of(message).split()) for message in (sent, given))
    return not one or not other or one == other


def text_of(message: Message) -> str:
    """The text of a message: of its text parts and, for a result of a tool, its output."""
    return "\n".join(text for part in _parts(message) if (text := _text(part)))


def _parts(message: Message) -> Iterator[Any]:
    content = message.get("content", message.get("parts"))
    yield from content if isinstance(content, list) else [content]


def _text(part: Json) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    if part.get("type") == "tool_result":
        return text_of(part)
    if "functionResponse" in part:
        return msgspec.json.encode(part["functionResponse"]).decode()
    text = part.get("text")
    return text if isinstance(text, str) and not part.get("thought") else ""


def _is_answer(message: Message) -> bool:
    return message.get("role") in ANSWERS


def _key(message: Message) -> bytes:
    """What two requests say alike if one continues the other: roles and texts. Agents set marks
    of caches elsewhere at each request, and rewrite arguments of tools."""
    role = "assistant" if _is_answer(message) else message.get("role")
    return msgspec.json.encode((role, " ".join(text_of(message).split())))


def digest_of_session(calls: Sequence[Transition]) -> str:
    """A digest of what its user and tools said, not of the answers: equal for a session that is
    repeated, whichever version answers. Otherwise it would count in each lane, and more in one with
    little traffic."""
    state = blake2b(digest_size=16)
    others = (*ANSWERS, *INSTRUCTION_ROLES)
    said = {_key(m): None for call in calls for m in call.messages if m.get("role") not in others}
    for key in said:
        state.update(key)
    return state.hexdigest()


def posted(rewards: Iterable[Reward]) -> dict[str, float]:
    """Values in 0..1 that were posted as feedback, by name: that of the session, else the mean of
    its calls'. A correction has the value 0: the answer should have been another."""
    whole, of_calls = dict[str, float](), dict[str, list[float]]()
    for row in rewards:
        if row.source != FEEDBACK or row.name in ASKED or not 0 <= row.value <= 1:
            continue
        if row.scope is Scope.ROLLOUT:
            whole[row.name] = row.value
        else:
            of_calls.setdefault(row.name, []).append(row.value)
    return {name: fmean(values) for name, values in of_calls.items()} | whole


def invalid_reason(said: Feedback) -> str:
    """Why feedback cannot be a signal; empty if it can."""
    name, value = said.name, said.value
    if name == CORRECTION:
        return "a correction is the text in the field 'correction'; choose another name"
    if name in reserved():
        return f"{name!r} is the name of a signal that is not posted; choose another"
    if value is not None and not 0 <= value <= 1:
        return f"the value {value:g} of {name!r:.80} is not between 0 and 1; scale it"
    if len(name) > MAX_NAME_CHARS or len(said.note) + len(said.correction or "") > MAX_TEXT_CHARS:
        return (
            f"a name has at most {MAX_NAME_CHARS} characters, note and correction "
            f"{MAX_TEXT_CHARS:,}"
        )
    return ""


def reserved() -> set[str]:
    """Rewards that a run makes itself. Clients cannot post them: they would decide what is
    learned."""
    return {*ASKED, SIGNAL, MARK, OUTCOME, FAILED, HINDSIGHT, TOLD, TURN}


def task_of(calls: Sequence[Transition]) -> Message:
    """The task that a verifier sees: the first thing that the user said."""
    users = (m for call in calls for m in call.messages if m.get("role") == "user")
    return {"input": next((text for m in users if (text := text_of(m))), "")}


def result_of(calls: Sequence[Transition]) -> str:
    """The result that a verifier sees: the text of the last answer that has one."""
    answers = (text_of(call.answer or {}) for call in reversed(calls))
    return next((text for text in answers if text), "")


VOTES = (FEEDBACK, CORRECTION)  # signals of what the user thinks
MEMORY = 200  # newest sessions of a user that are looked at
DAYS = 3  # in which sessions may end and are not labelled yet
STANDING = 30 * 86_400.0  # seconds after which a user is forgotten
FRESH, MANY = (
    5.0,
    1000,
)  # seconds, or 1/MANY more sessions, until outliers are computed again
MIN_SESSIONS = 5  # sessions of a user, or other users, from which on outliers are detected
MIN_VOTERS = 3  # users with votes, from which on a user's votes can be compared with others'
# How much farther than the median user's an outlier's votes are from other signals.
OUTLIER_MARGIN = 0.25
DEVIATIONS = 3.0  # standard deviations between an outlier and the median user
VARIANCE, MIN_VARIANCE = 0.25, 0.05  # of an outcome, at most; of a distance, at least
NORMAL = 1.4826  # standard deviation of a normal variable by its median absolute deviation
REPEATED = "it repeats another session of its user"
CAPPED = "its user has {} others of that day (live.people.per_user)"
CONTRARY = "the votes of its user contradict what else is known, see `agentrl live users`"
UNLIKE = "its user is unlike all others, see `agentrl live users`"
LATE = "it ended long before others that were counted"


def weighted(signals: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted mean of the known signals; NaN if none has a weight."""
    total = math.fsum(weights.get(name, 0.0) for name in signals)
    if not total:
        return math.nan
    return math.fsum(value * weights.get(name, 0.0) for name, value in signals.items()) / total


Outliers = tuple[dict[str, str], dict[str, str]]  # users -> why, by `contrary` and by `unlike`


class UserSession(NamedTuple):
    """What a session says about its user; None: nothing."""

    ended: float  # unix seconds
    outcome: float | None
    vote: float | None  # mean vote
    distance: float | None  # of vote and other signals


class Mean(NamedTuple):
    """Of values that may be missing; NaN if there are none."""

    value: float
    of: int


@dataclass(slots=True)
class User:
    """The last MEMORY sessions of a user, by session."""

    seen: dict[str, UserSession] = field(default_factory=dict)
    _means: dict[str, Mean] = field(default_factory=dict)  # by field of those, once asked for

    def add(self, session: str, seen: UserSession) -> bool:
        """Take a session into account, in place of what was known of it; whether that is new."""
        if self.seen.get(session) == seen:
            return False
        self.seen[session] = seen
        self._means.clear()
        if len(self.seen) > MEMORY:
            del self.seen[min(self.seen, key=lambda one: self.seen[one].ended)]
        return True

    def ended(self) -> float:
        """When its last session ended."""
        return max(one.ended for one in self.seen.values())

    def mean(self, name: str) -> Mean:
        """Of a field of its sessions."""
        if name not in self._means:
            known = [x for one in self.seen.values() if (x := getattr(one, name)) is not None]
            self._means[name] = Mean(mean(known), len(known))
        return self._means[name]


@dataclass(slots=True)
class Day:
    """The sessions of a day that count."""

    began: float  # end of its first session, in unix seconds
    # user -> (end, session) in order, and (user, digest) -> the first such session
    counted: defaultdict[str, list[tuple[float, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    first: dict[tuple[str, str], str] = field(default_factory=dict)

    def has(self, session: str, user: str, mark: Mark) -> bool:
        found, at = self.counted[user], (mark.ended, session)
        return at in found[bisect_left(found, at) :][:1]

    def add(self, session: str, user: str, mark: Mark) -> None:
        if not self.has(session, user, mark):
            insort(self.counted[user], (mark.ended, session))
            self.first.setdefault((user, mark.digest), session)


def mean(values: Iterable[float]) -> float:
    """NaN if there are none."""
    known = [*values]
    return fmean(known) if known else math.nan


def is_counted(mark: Mark) -> bool:
    """Whether a session counts, as far as its mark says; what is held because of its user may."""
    return mark.held in ("", UNLIKE, CONTRARY)


class Ledger:
    """What counts, by user. Sessions without user have neither cap nor standing."""

    def __init__(self, per_user: int, weights: Mapping[str, float]) -> None:
        self.users: defaultdict[str, User] = defaultdict(User)
        self.days: dict[str, Day] = {}
        self._per_user, self._weights = per_user, weights  # 0: no limit
        self._found: Outliers = {}, {}
        self._found_at, self._known, self._new = -math.inf, 0, 0  # when; sessions then, and since

    def admit(self, session: str, user: str, mark: Mark) -> str:
        """Why a session that has just ended does not count, whatever is known of it; empty if it
        may."""
        if not user:
            return ""
        if (day := self._day(mark)) is None:
            return LATE
        if day.has(session, user, mark):  # its label could not be written
            return ""
        if day.first.get((user, mark.digest), session) != session:
            return REPEATED
        if self._per_user and len(day.counted[user]) >= self._per_user:
            return CAPPED.format(self._per_user)
        day.add(session, user, mark)
        return ""

    def learn(self, session: str, user: str, mark: Mark) -> None:
        """Take a session with its signals into account, if it counts."""
        if not (user and is_counted(mark)):
            return
        if (day := self._day(mark)) is not None:
            day.add(session, user, mark)
        outcome = weighted(mark.all, self._weights)
        vote = mean(mark.posted[name] for name in VOTES if name in mark.posted)
        other = mean(mark.asked[name] for name in ASKED if name in mark.asked)
        known = (None if math.isnan(x) else x for x in (outcome, vote, abs(vote - other)))
        self._new += self.users[user].add(session, UserSession(mark.ended, *known))

    def _day(self, mark: Mark) -> Day | None:
        """The day of a session; None for one that is before those that are kept."""
        if mark.day in self.days:
            return self.days[mark.day]
        if len(self.days) >= DAYS and mark.day < min(self.days):
            return None
        day = self.days[mark.day] = Day(mark.ended)
        if len(self.days) > DAYS:
            del self.days[min(self.days)]
            self.tidy()
        return day

    def tidy(self) -> None:
        """Forget users who have not been seen for long. A clock that jumps makes one day at most,
        so the oldest of several is a real one."""
        since = min((day.began for day in self.days.values()), default=0.0) - STANDING
        for name in [name for name, one in self.users.items() if one.ended() < since]:
            del self.users[name]

    def outliers(self) -> Outliers:
        """`contrary` and `unlike`, as they were a short time ago."""
        late = time.monotonic() - self._found_at >= FRESH
        if self._new and (late or MANY * self._new >= self._known):
            self._found = self.contrary(), self.unlike()
            self._found_at, self._new = time.monotonic(), 0
            self._known = sum(len(one.seen) for one in self.users.values())
        return self._found

    def contrary(self) -> dict[str, str]:
        """Users whose votes are held back -> what they are like."""
        found = {name: one.mean("distance") for name, one in self.users.items()}
        known = {name: distance.value for name, distance in found.items() if distance.of}
        if len(known) < MIN_VOTERS:
            return {}
        usual = median(known.values())
        spread = max(usual * (1 - usual), MIN_VARIANCE)
        chance = {name: spread / found[name].of for name in known}
        return {
            name: f"its votes are {far:.2f} from the other signals of its sessions, those of the "
            f"median user {usual:.2f}"
            for name, far in known.items()
            if found[name].of >= MIN_SESSIONS
            and far - usual > max(OUTLIER_MARGIN, DEVIATIONS * math.sqrt(chance[name]))
        }

    def unlike(self) -> dict[str, str]:
        """Users who count for less than the median user -> what they are like. The deviation of
        others' means beyond chance is allowed for: some users ask harder questions."""
        found = {name: one.mean("outcome") for name, one in self.users.items()}
        means = {
            name: outcome.value for name, outcome in found.items() if outcome.of >= MIN_SESSIONS
        }
        if len(means) <= MIN_SESSIONS:
            return {}
        usual = median(means.values())
        chance = {name: VARIANCE / found[name].of for name in means}
        seen = NORMAL * median(abs(value - usual) for value in means.values())
        between = max(0.0, seen**2 - median(chance.values()))
        return {
            name: f"its mean outcome is {value:.2f}, that of the median user {usual:.2f}"
            for name, value in means.items()
            if abs(value - usual) > DEVIATIONS * math.sqrt(between + chance[name])
        }

    def few(self, day: str) -> int:
        """Sessions of a day that count of a user who is unlike all others."""
        counts = [len(found) for found in self.days[day].counted.values() if found]
        return max(1, int(median(counts)) // 2) if counts else 1

    def is_beyond(self, session: str, user: str, mark: Mark) -> bool:
        """Whether a session is not among the `few` of its user's day; of an older day, as it was
        decided then."""
        if (day := self.days.get(mark.day)) is None:
            return mark.held == UNLIKE
        return bisect_left(day.counted[user], (mark.ended, session)) >= self.few(mark.day)
