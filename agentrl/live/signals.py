"""Signals of a session, and the weights of sessions, signals and users. Signals come from the
messages after each answer, from the user's text, and from posted feedback. Messages are read in the
shapes of OpenAI (`content`, `tool_calls`, role `tool`), Anthropic (blocks in `content`) and Gemini
(`parts`, role `model`).

Invariant: whether a session counts depends only on the marks of earlier sessions, not on the order
in which they are read; so a restart makes the same decisions. At most `per_user` sessions of a user
per day count, and equal sessions of a user once. A user's votes that contradict the other signals
of the sessions are held back. A user with outlying outcomes has less weight than the median user.
`agentrl live users` shows both. Sessions of the newest `DAYS` days are kept in memory, and a user's
last sessions before that if one was within `STANDING`.
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
    """The reaction to the answer of one call: the user's next message, tool results, or both."""

    call: str  # id
    messages: list[Message]  # of the call's request
    answer: Message
    next: list[Message]


def replies(calls: Sequence[Transition]) -> list[Reply]:
    """The reply to each call that a later call continues."""
    dialogues = [
        [m for m in call.messages if m.get("role") not in INSTRUCTION_ROLES] for call in calls
    ]
    keys = [[_key(message) for message in messages] for messages in dialogues]
    all_replies = []
    for i, call in enumerate(calls):
        later = (
            following
            for j in range(i + 1, len(calls))
            if (following := _beyond(call, keys[i], dialogues[j], keys[j]))
        )
        if call.answer is not None and call.repeats is None and (after := next(later, None)):
            all_replies.append(
                Reply(call=call.id, messages=call.messages, answer=call.answer, next=after)
            )
    return all_replies


def _beyond(
    call: Transition, prefix: list[bytes], messages: list[Message], keys: list[bytes]
) -> list[Message]:
    """The messages between the call's answer in a later request and the next answer; empty if the
    request does not continue this answer."""
    if keys[: len(prefix)] != prefix:
        return []
    continuation = messages[len(prefix) :]
    if (
        not continuation
        or not _is_answer(continuation[0])
        or not _same_answer(continuation[0], call.answer or {})
    ):
        return []
    return [*takewhile(lambda m: not _is_answer(m), dropwhile(_is_answer, continuation))]


def _same_answer(sent: Message, answer: Message) -> bool:
    """Whether a message is the answer of a call; agents may leave out its text or reasoning."""
    sent_text, answer_text = (" ".join(text_of(message).split()) for message in (sent, answer))
    return not sent_text or not answer_text or sent_text == answer_text


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
    """The parts of messages that are equal if one request continues another: roles and texts.
    Agents move cache marks at each request, and rewrite arguments of tools."""
    role = "assistant" if _is_answer(message) else message.get("role")
    return msgspec.json.encode((role, " ".join(text_of(message).split())))


def digest_of_session(calls: Sequence[Transition]) -> str:
    """A digest of the messages of users and tools, but not of the answers: equal for a repeated
    session, whichever version answers. Otherwise a repetition would count in each lane, with more
    effect in a lane with little traffic."""
    state = blake2b(digest_size=16)
    others = (*ANSWERS, *INSTRUCTION_ROLES)
    keys = {_key(m): None for call in calls for m in call.messages if m.get("role") not in others}
    for key in keys:
        state.update(key)
    return state.hexdigest()


def posted(rewards: Iterable[Reward]) -> dict[str, float]:
    """Values in 0..1 that were posted as feedback, by name: the value of the session, else the mean
    over its calls. A correction has the value 0: the answer was wrong."""
    whole, of_calls = dict[str, float](), dict[str, list[float]]()
    for row in rewards:
        if row.source != FEEDBACK or row.name in ASKED or not 0 <= row.value <= 1:
            continue
        if row.scope is Scope.ROLLOUT:
            whole[row.name] = row.value
        else:
            of_calls.setdefault(row.name, []).append(row.value)
    return {name: fmean(values) for name, values in of_calls.items()} | whole


def invalid_reason(feedback: Feedback) -> str:
    """Why feedback cannot be a signal; empty if it can."""
    name, value = feedback.name, feedback.value
    if name == CORRECTION:
        return "a correction is the text in the field 'correction'; choose another name"
    if name in reserved():
        return f"{name!r} is the name of a signal that is not posted; choose another"
    if value is not None and not 0 <= value <= 1:
        return f"the value {value:g} of {name!r:.80} is not between 0 and 1; scale it"
    if (
        len(name) > MAX_NAME_CHARS
        or len(feedback.note) + len(feedback.correction or "") > MAX_TEXT_CHARS
    ):
        return (
            f"a name has at most {MAX_NAME_CHARS} characters, note and correction "
            f"{MAX_TEXT_CHARS:,}"
        )
    return ""


def reserved() -> set[str]:
    """Names of rewards that a run computes itself. Clients cannot post them, because they would
    control the training."""
    return {*ASKED, SIGNAL, MARK, OUTCOME, FAILED, HINDSIGHT, TOLD, TURN}


def task_of(calls: Sequence[Transition]) -> Message:
    """The task for a verifier: the first user message."""
    users = (m for call in calls for m in call.messages if m.get("role") == "user")
    return {"input": next((text for m in users if (text := text_of(m))), "")}


def result_of(calls: Sequence[Transition]) -> str:
    """The result for a verifier: the text of the last answer with text."""
    answers = (text_of(call.answer or {}) for call in reversed(calls))
    return next((text for text in answers if text), "")


VOTES = (FEEDBACK, CORRECTION)  # signals of the user's opinion
MEMORY = 200  # newest sessions of a user that are used
DAYS = 3  # within which ended sessions may still be unlabelled
STANDING = 30 * 86_400.0  # seconds after which a user is forgotten
FRESH, MANY = 5.0, 1000  # outliers are computed again after FRESH seconds or 1/MANY more sessions
MIN_SESSIONS = 5  # minimum sessions of a user, and minimum other users, to detect outliers
MIN_VOTERS = 3  # minimum users with votes, to compare the votes of a user with those of others
# How much farther an outlier's votes are from the other signals than the median user's votes are.
OUTLIER_MARGIN = 0.25
DEVIATIONS = 3.0  # standard deviations between an outlier and the median user
VARIANCE, MIN_VARIANCE = 0.25, 0.05  # maximum for outcomes; minimum for distances
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
    """What a session contributes to the statistics of its user; None: nothing."""

    ended: float  # unix seconds
    outcome: float | None
    vote: float | None  # mean vote
    distance: float | None  # between vote and other signals


class Mean(NamedTuple):
    """Running mean of values that may be missing; NaN if there are none."""

    value: float
    of: int


@dataclass(slots=True)
class User:
    """The last MEMORY sessions of a user, by session."""

    seen: dict[str, UserSession] = field(default_factory=dict)
    _means: dict[str, Mean] = field(default_factory=dict)  # by field, computed on demand

    def add(self, session: str, seen: UserSession) -> bool:
        """Add or replace a session; return whether something changed."""
        if self.seen.get(session) == seen:
            return False
        self.seen[session] = seen
        self._means.clear()
        if len(self.seen) > MEMORY:
            del self.seen[min(self.seen, key=lambda id: self.seen[id].ended)]
        return True

    def ended(self) -> float:
        """When its last session ended."""
        return max(session.ended for session in self.seen.values())

    def mean(self, name: str) -> Mean:
        """The mean of a field over the user's sessions."""
        if name not in self._means:
            values = [
                x for session in self.seen.values() if (x := getattr(session, name)) is not None
            ]
            self._means[name] = Mean(mean(values), len(values))
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
        counted, at = self.counted[user], (mark.ended, session)
        return at in counted[bisect_left(counted, at) :][:1]

    def add(self, session: str, user: str, mark: Mark) -> None:
        if not self.has(session, user, mark):
            insort(self.counted[user], (mark.ended, session))
            self.first.setdefault((user, mark.digest), session)


def mean(values: Iterable[float]) -> float:
    """NaN if there are none."""
    present = [*values]
    return fmean(present) if present else math.nan


def is_counted(mark: Mark) -> bool:
    """Whether a session counts according to its mark; sessions that are held back because of their
    user may count."""
    return mark.held in ("", UNLIKE, CONTRARY)


class Ledger:
    """The counted sessions by user. Sessions without a user have no cap and no weight."""

    def __init__(self, per_user: int, weights: Mapping[str, float]) -> None:
        self.users: defaultdict[str, User] = defaultdict(User)
        self.days: dict[str, Day] = {}
        self._per_user, self._weights = per_user, weights  # 0: no limit
        self._last_outliers: Outliers = {}, {}
        # Time of the last search, the number of sessions then, and of new ones since.
        self._searched_at, self._sessions_then, self._new = -math.inf, 0, 0

    def admit(self, session: str, user: str, mark: Mark) -> str:
        """Why a session that has just ended does not count, independent of its signals; empty if it
        may."""
        if not user:
            return ""
        if (day := self._day(mark)) is None:
            return LATE
        if day.has(session, user, mark):  # the session's label could not be written
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
        other_signals = mean(mark.asked[name] for name in ASKED if name in mark.asked)
        values = (None if math.isnan(x) else x for x in (outcome, vote, abs(vote - other_signals)))
        self._new += self.users[user].add(session, UserSession(mark.ended, *values))

    def _day(self, mark: Mark) -> Day | None:
        """The day of a session; None if it is older than the kept days."""
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
        """Drop users without recent sessions. A jump of the clock creates at most one wrong day, so
        the oldest of several days is real."""
        since = min((day.began for day in self.days.values()), default=0.0) - STANDING
        for name in [name for name, user in self.users.items() if user.ended() < since]:
            del self.users[name]

    def outliers(self) -> Outliers:
        """`contrary` and `unlike`, as they were a short time ago."""
        late = time.monotonic() - self._searched_at >= FRESH
        if self._new and (late or MANY * self._new >= self._sessions_then):
            self._last_outliers = self.contrary(), self.unlike()
            self._searched_at, self._new = time.monotonic(), 0
            self._sessions_then = sum(len(user.seen) for user in self.users.values())
        return self._last_outliers

    def contrary(self) -> dict[str, str]:
        """Users whose votes are held back -> their statistics."""
        distances = {name: user.mean("distance") for name, user in self.users.items()}
        voters = {name: distance.value for name, distance in distances.items() if distance.of}
        if len(voters) < MIN_VOTERS:
            return {}
        usual = median(voters.values())
        spread = max(usual * (1 - usual), MIN_VARIANCE)
        chance = {name: spread / distances[name].of for name in voters}
        return {
            name: f"its votes are {far:.2f} from the other signals of its sessions, those of the "
            f"median user {usual:.2f}"
            for name, far in voters.items()
            if distances[name].of >= MIN_SESSIONS
            and far - usual > max(OUTLIER_MARGIN, DEVIATIONS * math.sqrt(chance[name]))
        }

    def unlike(self) -> dict[str, str]:
        """Users with less weight than the median user -> their statistics. The variation between
        other users beyond chance is allowed, because some users ask harder questions."""
        outcomes = {name: user.mean("outcome") for name, user in self.users.items()}
        means = {
            name: outcome.value for name, outcome in outcomes.items() if outcome.of >= MIN_SESSIONS
        }
        if len(means) <= MIN_SESSIONS:
            return {}
        usual = median(means.values())
        chance = {name: VARIANCE / outcomes[name].of for name in means}
        spread = NORMAL * median(abs(value - usual) for value in means.values())
        between = max(0.0, spread**2 - median(chance.values()))
        return {
            name: f"its mean outcome is {value:.2f}, that of the median user {usual:.2f}"
            for name, value in means.items()
            if abs(value - usual) > DEVIATIONS * math.sqrt(between + chance[name])
        }

    def few(self, day: str) -> int:
        """How many sessions of a day count for a user who is unlike all others."""
        counts = [len(sessions) for sessions in self.days[day].counted.values() if sessions]
        return max(1, int(median(counts)) // 2) if counts else 1

    def is_beyond(self, session: str, user: str, mark: Mark) -> bool:
        """Whether a session exceeds the `few` sessions of its user and day; for an older day as
        decided then."""
        if (day := self.days.get(mark.day)) is None:
            return mark.held == UNLIKE
        return bisect_left(day.counted[user], (mark.ended, session)) >= self.few(mark.day)
