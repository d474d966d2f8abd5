"""Rows of the store: records as columns and back, validated before every write.

The checks say whether values can be stored, read back and trained on; each raises Invalid with a
message about how to fix the value. The conversions are pure functions; no other module knows both
formats.
"""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256
from itertools import chain, groupby, pairwise
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from agentrl.core import types
from agentrl.core.errors import Invalid
from agentrl.core.types import (
    Image,
    NewRollout,
    Outcome,
    Reward,
    Sampling,
    Scope,
    StepCommit,
    Transition,
)
from agentrl.store.records import CallRow

LATEST_TIME = 2**33  # seconds: in nanoseconds it fits into OpenTelemetry's 64 bits
MAX_LEASE = 3600.0  # seconds for which a dead runner may keep a rollout
MAX_ID_BYTES = 512  # bytes: several ids fit into an index row, which has 2704 bytes in PostgreSQL
MAX_SIDE_PIXELS = 2**31  # pixels of an image's width or height
DIGEST = re.compile("[0-9a-f]{64}")  # digest of an image
MAX_REWARD = 1e15  # sums of many squares still fit into a float32
MAX_LOGPROB = 0.01  # tolerance of a sampler's log-prob above 0
# Sign bytes of float32 numbers that are negative and finite, or positive and less than 0.0079.
USUAL_SIGNS = bytes(range(0x80, 0xFF)) + bytes(range(0x3C))


def check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise Invalid(f"{name} must be positive and finite, not {value}.")


def check_lease(lease: float) -> None:
    check_positive("lease", lease)
    if lease > MAX_LEASE:
        raise Invalid(
            f"lease is {lease:g} seconds, the maximum is {MAX_LEASE:g}: keep an attempt longer "
            "by heartbeats."
        )


def check_id(subject: str, id: str) -> None:
    """Check the length of an id; `subject`: start of the error message."""
    if len(id) * 4 > MAX_ID_BYTES and len(id.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        raise Invalid(
            f"{subject} is longer than {MAX_ID_BYTES} bytes ({id[:40]}...): choose a shorter one."
        )


def check_ids(subject: str, names: Iterable[str]) -> None:
    for name in names:
        check_id(subject, name)


def check_rollout(rollout: NewRollout) -> None:
    for field, id in (("id", rollout.id), ("run", rollout.run), ("group", rollout.group)):
        check_id(f"The {field} of a rollout", id)
    where, branch = f"Rollout {rollout.id}", rollout.branch
    if rollout.max_attempts < 1 or not 0 < rollout.timeout < math.inf:
        raise Invalid(
            f"{where}: max_attempts must be at least 1 and timeout a positive number of seconds."
        )
    if branch is not None and branch.calls < 1:
        raise Invalid(
            f"{where}: a branch repeats at least one call; omit `branch` for a rollout that starts "
            "from scratch."
        )
    if branch is not None and not rollout.seats.keys() >= set(branch.without):
        raise Invalid(
            f"{where}: not all roles of branch.without ({', '.join(branch.without)}) have a seat; "
            "name the policies that play them in `seats`."
        )
    if not all(role and policy for role, policy in rollout.seats.items()):
        raise Invalid(f"{where}: a seat maps a role to a policy, and both names must not be empty.")
    _check_sampling(where, rollout.sampling)


def _check_sampling(where: str, sampling: Sampling) -> None:
    if not (math.isfinite(sampling.temperature) and math.isfinite(sampling.top_p)):
        raise Invalid(f"{where}: temperature and top_p must be finite numbers.")


def check_transition(t: Transition) -> None:
    where = f"Call {t.id}"
    check_id("The id of a call", t.id)
    for name, values, code in (
        ("prompt", t.prompt, "i"),
        ("completion", t.completion, "i"),
        ("logprobs", t.logprobs, "f"),
    ):
        if not isinstance(values, array) or values.typecode != code:
            raise Invalid(
                f"{where}: {name} must be an array made by agentrl.core.types."
                f"{'int32' if code == 'i' else 'float32'}, not {type(values).__name__}."
            )
    if t.exact and len(t.logprobs) != len(t.completion):
        raise Invalid(
            f"{where}: {len(t.logprobs)} log-probs for {len(t.completion)} completion tokens; "
            "send one for each, or mark the call as not exact."
        )
    for name, values in (("prompt", t.prompt), ("completion", t.completion)):
        if not to_blob(values)[3::4].isascii():  # the byte with the sign
            raise Invalid(f"{where}: its {name} has a negative number, not a token id.")
    if to_blob(t.logprobs)[3::4].translate(None, USUAL_SIGNS):
        if not math.isfinite(sum(t.logprobs)):
            raise Invalid(f"{where}: a log-prob is not finite.")
        if (most := max(t.logprobs)) > MAX_LOGPROB:
            raise Invalid(f"{where}: a log-prob is {most:g}; it must not be above 0.")
    if t.spans and not (_rises(t) and t.spans[0] == (0, t.version)):
        raise Invalid(
            f"{where}: spans {t.spans} must begin with [0, {t.version}], with increasing first "
            f"tokens and versions, within its {len(t.completion)} tokens."
        )
    if not (0 <= t.started < LATEST_TIME and abs(t.seconds) < LATEST_TIME):  # clocks can go back
        raise Invalid(
            f"{where}: started and seconds must be finite, from 0 to below {LATEST_TIME}."
        )
    check_digests(f"{where}: an image", t.images)
    _check_sampling(where, t.sampling)


def check_digests(subject: str, digests: Iterable[str]) -> None:
    for digest in digests:
        if not DIGEST.fullmatch(digest):
            raise Invalid(
                f"{subject} is named {digest!r:.80}: name it by the sha256 of its file, in 64 "
                "hexadecimal digits."
            )


def check_image(image: Image) -> None:
    check_digests("An image", [image.digest])
    if sha256(image.body).hexdigest() != image.digest:
        raise Invalid(f"Image {image.digest}: this is not the sha256 of its body.")
    check_id(f"The media type of image {image.digest}", image.media_type)
    if not (0 < image.width < MAX_SIDE_PIXELS and 0 < image.height < MAX_SIDE_PIXELS):
        raise Invalid(f"Image {image.digest}: {image.width} x {image.height} pixels are no size.")


def _rises(t: Transition) -> bool:
    starts, versions = [start for start, _ in t.spans], [version for _, version in t.spans]
    return all(a < b for row in ([*starts, len(t.completion)], versions) for a, b in pairwise(row))


def check_outcome(outcome: Outcome) -> None:
    if outcome.retry and outcome.failure is None:
        raise Invalid(f"Attempt {outcome.attempt} succeeded: only a failure can be retried.")
    for reward in outcome.rewards:
        check_reward(reward, f"attempt {outcome.attempt}")
    check_ids("The id of a span", (span.id for span in outcome.spans))
    for span in outcome.spans:
        if span.attempt != outcome.attempt:
            raise Invalid(
                f"Span {span.id} of attempt {span.attempt} came with attempt {outcome.attempt}."
            )


def check_reward(reward: Reward, owner: str) -> None:
    """Check a reward's name, value and target; `owner`: the rewarded object, for the error
    message."""
    where = f"Reward {reward.name!r} of {owner}"
    if not math.isfinite(reward.value):
        raise Invalid(f"{where} is {reward.value}: a reward must be finite; omit a missing one.")
    if abs(reward.value) > MAX_REWARD:
        raise Invalid(
            f"{where} is {reward.value:g}: it must be between -{MAX_REWARD:g} and "
            f"{MAX_REWARD:g}; scale it."
        )
    if (reward.target is None) is not (reward.scope is Scope.ROLLOUT):
        raise Invalid(f"{where}: name a target for scope transition or role, none for rollout.")


def check_commit(commit: StepCommit) -> None:
    check_ids("A metric's name", commit.metrics)
    for step_reward in commit.rewards:
        check_reward(step_reward.reward, f"rollout {step_reward.rollout}")
    for credit in commit.credits:
        for name in CREDIT:
            values = getattr(credit, name)
            if not isinstance(values, array) or values.typecode != "f":
                raise Invalid(
                    f"Credit of call {credit.transition}: {name} must be an array made by "
                    f"agentrl.core.types.float32, not {type(values).__name__}."
                )


Columns = dict[str, Any]
Row = Any  # a database row, read by column name
R = TypeVar("R", bound=types.Record)
NO_ERROR = {"kind": None, "message": None, "traceback": None}
COLUMNS = {
    "attempt": "attempt_id",
    "created": "created_at",
    "end": "ended_at",
    "ended": "ended_at",
    "group": "group_id",
    "index": "position",
    "parent": "parent_id",
    "run": "run_id",
    "span": "span_id",
    "start": "started_at",
    "started": "started_at",
    "trained": "trained_step",
}
"""Field of a record -> its column, if the names differ."""


# -- values ----------------------------------------------------------------------------------------


def to_json(value: types.Json, subject: str) -> str:
    """Encode a user's payload. Raises Invalid, naming `subject`, if it is not JSON or has an
    integer of more than 64 bits, which msgpack, hence the HTTP API, cannot represent."""
    try:
        msgspec.msgpack.encode(value)
        return msgspec.json.encode(value).decode()
    except OverflowError as error:
        raise Invalid(
            f"{subject} has an integer of more than 64 bits: send it as text or as a float."
        ) from error
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Invalid(f"{subject} cannot be encoded as JSON: {error}.") from error


def from_json(text: str | None) -> types.Json:
    return None if text is None else msgspec.json.decode(text)


def storable_text(text: str) -> str:
    """Replace lone surrogates and NUL characters, which not every database can store, by `?`."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def to_blob(values: array[Any]) -> bytes:
    """Encode numbers as little-endian bytes."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def from_blob(typecode: str, data: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def array_to_bytes(value: Any) -> Any:
    """Encode tokens and log-probs for msgpack."""
    if isinstance(value, array):
        return to_blob(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def array_from_bytes(type_: Any, value: Any) -> Any:
    """Decode tokens or log-probs from msgpack."""
    if not isinstance(value, bytes) or len(value) % 4:
        raise ValueError("expected the bytes of 4-byte numbers, little-endian")
    values = type_("i" if type_ is types.Int32 else "f", value)
    if sys.byteorder == "big":
        values.byteswap()
    return values


MIN_RUN_TOKENS = 4  # tokens


def with_runs(data: bytes) -> bytes:
    """Shorten runs of equal tokens, such as an image's placeholders: -n stands for n repetitions of
    the token before it. No token id is negative."""
    shortened: array[int] = array("i")
    for token, run in groupby(from_blob("i", data)):
        size = len(list(run))
        shortened.extend([token, 1 - size] if size >= MIN_RUN_TOKENS else [token] * size)
    return to_blob(shortened)


def without_runs(data: bytes) -> bytes:
    """Undo `with_runs`."""
    if data[3::4].isascii():  # the bytes with the sign
        return data
    tokens: array[int] = array("i")
    for token in from_blob("i", data):
        tokens.extend([tokens[-1]] * -token if token < 0 else [token])
    return to_blob(tokens)


def digest(data: bytes | memoryview) -> bytes:
    """Return a 128-bit hash, long enough to identify content."""
    return blake2b(data, digest_size=16).digest()


def record(kind: type[R], row: Row, **converted: Any) -> R:
    """Build a record from a row; `converted`: values of fields that need a conversion."""
    names = (name for name in kind.__struct_fields__ if name not in converted)
    return kind(**{name: row[COLUMNS.get(name, name)] for name in names}, **converted)


# -- queue -----------------------------------------------------------------------------------------


def new_rollout_columns(rollout: types.NewRollout) -> Columns:
    branch = rollout.branch
    without = branch.without if branch is not None else []
    return asdict(rollout) | {
        "purpose": rollout.purpose.value,
        "sampling": to_json(rollout.sampling, "sampling"),
        "task": to_json(rollout.task, f"The task of rollout {rollout.id}"),
        "branch_of": None if branch is None else branch.rollout,
        "branch_calls": None if branch is None else branch.calls,
        "branch_without": to_json(without, "branch.without") if without else None,
        "seats": to_json(rollout.seats, "seats") if rollout.seats else None,
    }


def attempt(
    row: Row, id: str, fence: int, lease_until: float, prompts: list[types.PromptText]
) -> types.Attempt:
    """Build an attempt from a rollout's row."""
    sampling = types.Sampling(**msgspec.json.decode(row["sampling"]))
    rollout = record(types.NewRollout, row, sampling=sampling, **_rollout_fields(row))
    return types.Attempt(
        id=id,
        rollout=rollout,
        fence=fence,
        lease_until=lease_until,
        ran=from_json(row["ran"]),
        prompts=prompts,
    )


def rollout(row: Row, rewards: list[types.Reward]) -> types.Rollout:
    """Build a rollout without its calls."""
    return record(
        types.Rollout,
        row,
        state=types.RolloutState(row["state"]),
        result=from_json(row["result"]),
        failure=failure(row),
        rewards=rewards,
        transitions=[],
        **_rollout_fields(row),
    )


def _rollout_fields(row: Row) -> Columns:
    branch = None
    if row["branch_of"] is not None:
        without = from_json(row["branch_without"]) or []
        branch = types.Branch(rollout=row["branch_of"], calls=row["branch_calls"], without=without)
    return {
        "task": from_json(row["task"]),
        "purpose": types.Purpose(row["purpose"]),
        "branch": branch,
        "seats": from_json(row["seats"]) or {},
    }


def failure(row: Row) -> types.Failure | None:
    if row["error_kind"] is None:
        return None
    kind, message = types.ErrorKind(row["error_kind"]), row["error_message"]
    return types.Failure(kind=kind, message=message, traceback=row["error_traceback"])


def failure_columns(failure: types.Failure | None) -> Columns:
    return NO_ERROR if failure is None else {**asdict(failure), "kind": failure.kind.value}


# -- traces --------------------------------------------------------------------------------------


def transition_columns(t: types.Transition) -> Columns:
    """Return all columns but prompt, messages, tools and position in the tree."""
    answer = None if t.answer is None else to_json(t.answer, f"The answer of call {t.id}")
    return asdict(t) | {
        "sampling": to_json(_sampling(t), "sampling"),
        "completion": to_blob(t.completion),
        "logprobs": to_blob(t.logprobs),
        "answer": answer,
        "left_out": to_json(t.ignored, "ignored") if t.ignored else None,
        "spans": to_json(t.spans, "spans") if t.spans else None,
        "images": bytes.fromhex("".join(t.images)) if t.images else None,
    }


def _sampling(t: types.Transition) -> types.Json:
    """Return the content of the column `sampling`, which has the processors too, if any."""
    return asdict(t.sampling) | {"processors": t.processors} if t.processors else t.sampling


def transitions(
    rows: Sequence[Row], *, late: bool = False, selected: slice = slice(None)
) -> dict[str, list[types.Transition]]:
    """Build calls by attempt, in order of index: either the regular or the late ones; for each
    attempt those in the slice `selected`. `rows`: complete attempts in order of arrival."""
    tree, by_attempt = _CallRows(rows), dict[str, list[Row]]()
    for row in rows:
        if bool(row["late"]) is late:
            by_attempt.setdefault(row["attempt_id"], []).append(row)
    calls_by_attempt: dict[str, list[types.Transition]] = {}
    for attempt, calls in by_attempt.items():
        calls.sort(key=lambda row: row["position"])
        calls_by_attempt[attempt] = [tree.call(row) for row in calls[selected]]
    return calls_by_attempt


class _CallRows:
    """The rows of attempts' calls, each without the data of its parents. So the cost of a few calls
    at the end of a long conversation depends on their own size, not on that of all calls before
    them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row["seq"]: row for row in rows}
        self._built: dict[int, types.Transition] = {}
        self._decoded: dict[int, tuple[list[dict[str, types.Json]], types.Json]] = {}

    def call(self, row: Row) -> types.Transition:
        sampling = msgspec.json.decode(row["sampling"])
        self._built[row["seq"]] = call = record(
            types.Transition,
            row,
            processors=sampling.pop("processors", {}),
            sampling=types.Sampling(**sampling),
            prompt=from_blob("i", self._prompt(row)),
            completion=from_blob("i", row["completion"]),
            logprobs=from_blob("f", row["logprobs"]),
            exact=bool(row["exact"]),
            messages=self._messages(row),
            tools=from_json(row["tools_body"]) or [],
            answer=self._messages_and_answer(row)[1],
            ignored=from_json(row["left_out"]) or [],
            spans=version_spans(row),
            images=_digests(row["images"]),
        )
        return call

    def _prompt(self, row: Row) -> bytes:
        parts = [without_runs(row["prompt"])]
        while parent := self._rows.get(row["parent"]):
            if call := self._built.get(parent["seq"]):
                parts += [to_blob(call.completion), to_blob(call.prompt)]
                break
            parts += [parent["completion"], without_runs(parent["prompt"])]
            row = parent
        return b"".join(reversed(parts))

    def _messages(self, row: Row) -> list[dict[str, types.Json]]:
        """Decode messages; equal messages of several calls share one object."""
        parts, taken = [self._messages_and_answer(row)[0]], row["chat_shared"]
        while taken and (parent := self._rows.get(row["chat_parent"])):
            if call := self._built.get(parent["seq"]):
                parts.append(self._with_answer(call.messages, call.answer, taken))
                break
            inherited = parent["chat_shared"] if parent["chat_parent"] in self._rows else 0
            if taken > inherited:
                parts.append(
                    self._with_answer(*self._messages_and_answer(parent), taken - inherited)
                )
                taken = inherited
            row = parent
        return list(chain.from_iterable(reversed(parts)))

    @staticmethod
    def _with_answer(messages: Any, answer: Any, n: int) -> list[dict[str, types.Json]]:
        """The first `n` messages of a conversation; the last of them is an answer."""
        conversation: list[dict[str, types.Json]] = messages[:n]
        return conversation if n <= len(messages) or answer is None else [*conversation, answer]

    def _messages_and_answer(self, row: Row) -> tuple[list[dict[str, types.Json]], Any]:
        seq = row["seq"]
        if seq not in self._decoded:
            self._decoded[seq] = from_json(row["messages"]), from_json(row["answer"])
        return self._decoded[seq]


def version_spans(row: Row) -> list[tuple[int, int]]:
    return [(first, version) for first, version in from_json(row["spans"]) or ()]


MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])  # to count them


def outline(rows: Sequence[Row]) -> list[CallRow]:
    """Build the outline of an attempt from the rows of its regular calls, in order of index."""
    place = {row["seq"]: at for at, row in enumerate(rows)}
    calls: list[CallRow] = []
    for at, row in enumerate(rows):
        parent = place.get(row["chat_parent"], at)
        shared = row["chat_shared"] if parent < at else 0
        sampled = row["completion"]
        calls.append(
            record(
                CallRow,
                row,
                spans=version_spans(row),
                tokens=len(sampled) // 4,
                sampled=digest(sampled).hex(),
                messages=shared + len(MESSAGES.decode(row["messages"])),
                parent=parent if parent < at else None,
                shared=shared,
            )
        )
    return calls


def _digests(column: bytes | None) -> tuple[str, ...]:
    digests = column or b""
    return tuple(digests[at : at + 32].hex() for at in range(0, len(digests), 32))


def span_columns(span: types.Span, *, late: bool) -> Columns:
    attributes = to_json(span.attributes, f"The attributes of span {span.name!r}")
    return asdict(clean_span(span)) | {"late": late, "attributes": attributes}


def span(row: Row) -> types.Span:
    return record(types.Span, row, ok=bool(row["ok"]), attributes=from_json(row["attributes"]))


def clean_span(span: types.Span) -> types.Span:
    return replace(span, name=storable_text(span.name))


def clean_outcome(outcome: types.Outcome) -> types.Outcome:
    """Make the texts of an outcome's failure and spans storable."""
    failure = outcome.failure
    if failure is not None:
        message, traceback = storable_text(failure.message), storable_text(failure.traceback)
        failure = replace(failure, message=message, traceback=traceback)
    return replace(outcome, failure=failure, spans=[clean_span(span) for span in outcome.spans])


def reward_columns(reward: types.Reward, attempt: str, position: int, **more: Any) -> Columns:
    """`more`: whether it is `late`, and the training `step` that assigned it, if any."""
    columns = {"scope": reward.scope.value, "attempt": attempt, "position": position}
    return {**asdict(reward), "late": False, "step": None, **columns, **more}


def reward(row: Row) -> types.Reward:
    return record(types.Reward, row, scope=types.Scope(row["scope"]))


# -- credit ----------------------------------------------------------------------------------------

CREDIT = ("advantage", "baseline", "gate", "weight", "psi")


def credit_columns(credit: types.Credit) -> Columns:
    """Return all columns but the step and the call's `transitions.seq`."""
    numbers = {name: to_blob(getattr(credit, name)) for name in CREDIT}
    return {"id": credit.transition, "policy": credit.policy, **numbers}


def credit(row: Row) -> types.Credit:
    numbers = {name: from_blob("f", row[name]) for name in CREDIT}
    return types.Credit(transition=row["id"], policy=row["policy"], **numbers)
