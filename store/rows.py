"""Records to columns and back. Pure functions; the only place that knows both shapes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from agentrl.errors import Invalid
from agentrl.types import (
    Attempt,
    Branch,
    Credit,
    ErrorKind,
    Failure,
    Json,
    NewRollout,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Sampling,
    Scope,
    Span,
    Transition,
)

NO_ERROR = {"kind": None, "message": None, "traceback": None}


class DatabaseRow(Protocol):
    """A row of any database, by column name."""

    def __getitem__(self, column: str, /) -> Any: ...


# -- values ----------------------------------------------------------------------------------------


def to_json(value: Json, what: str) -> str:
    """JSON text of a user's payload. Raises Invalid, naming `what`, if it is none or has an integer
    of more than 64 bits, which msgpack, and so whoever reads it over HTTP, does not have."""
    try:
        msgspec.msgpack.encode(value)
        return msgspec.json.encode(value).decode()
    except OverflowError as error:
        raise Invalid(
            f"{what} has an integer of more than 64 bits: send it as text or as a float."
        ) from error
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Invalid(f"{what} cannot be written as JSON: {error}.") from error


def from_json(text: str | None) -> Json:
    return None if text is None else msgspec.json.decode(text)


def storable_text(text: str) -> str:
    """Text from the outside world: lone surrogates and zeros, which not every database stores,
    become `?`."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def to_blob(values: array[Any]) -> bytes:
    """Little-endian, as it is stored."""
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


def digest(data: bytes | memoryview) -> bytes:
    """128 bits: two different byte strings of one attempt never meet."""
    return blake2b(data, digest_size=16).digest()


# -- queue -----------------------------------------------------------------------------------------


def new_rollout_columns(rollout: NewRollout) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "run": rollout.run,
        "group": rollout.group,
        "index": rollout.index,
        "purpose": rollout.purpose.value,
        "step": rollout.step,
        "priority": rollout.priority,
        "max_attempts": rollout.max_attempts,
        "timeout": rollout.timeout,
        "sampling": to_json(rollout.sampling, "sampling"),
        "task": to_json(rollout.task, f"The task of rollout {rollout.id}"),
        "branch_of": None if rollout.branch is None else rollout.branch.rollout,
        "branch_calls": None if rollout.branch is None else rollout.branch.calls,
        "branch_without": _without(rollout),
        "seats": to_json(rollout.seats, "seats") if rollout.seats else None,
    }


def attempt(row: DatabaseRow, id: str, fence: int, lease_until: float) -> Attempt:
    """The lease of a rollout's row."""
    rollout = NewRollout(
        id=row["id"],
        run=row["run_id"],
        group=row["group_id"],
        index=row["position"],
        task=from_json(row["task"]),
        purpose=Purpose(row["purpose"]),
        sampling=msgspec.json.decode(row["sampling"], type=Sampling),
        step=row["step"],
        max_attempts=row["max_attempts"],
        timeout=row["timeout"],
        priority=row["priority"],
        branch=_branch(row),
        seats=from_json(row["seats"]) or {},
    )
    return Attempt(id=id, rollout=rollout, fence=fence, lease_until=lease_until)


def rollout(row: DatabaseRow, rewards: list[Reward], transitions: list[Transition]) -> Rollout:
    return Rollout(
        id=row["id"],
        run=row["run_id"],
        group=row["group_id"],
        index=row["position"],
        task=from_json(row["task"]),
        purpose=Purpose(row["purpose"]),
        state=RolloutState(row["state"]),
        step=row["step"],
        attempts=row["attempts"],
        attempt=row["attempt_id"],
        result=from_json(row["result"]),
        failure=failure(row),
        rewards=rewards,
        transitions=transitions,
        seconds=row["seconds"],
        trained=row["trained_step"],
        branch=_branch(row),
        seats=from_json(row["seats"]) or {},
    )


def _without(rollout: NewRollout) -> str | None:
    if rollout.branch is None or not rollout.branch.without:
        return None
    return to_json(rollout.branch.without, "branch.without")


def _branch(row: DatabaseRow) -> Branch | None:
    if row["branch_of"] is None:
        return None
    without = from_json(row["branch_without"]) or []
    return Branch(rollout=row["branch_of"], calls=row["branch_calls"], without=without)


def failure(row: DatabaseRow) -> Failure | None:
    if row["error_kind"] is None:
        return None
    return Failure(
        kind=ErrorKind(row["error_kind"]),
        message=row["error_message"],
        traceback=row["error_traceback"],
    )


def failure_columns(failure: Failure | None) -> dict[str, str | None]:
    if failure is None:
        return dict(NO_ERROR)
    return {
        "kind": failure.kind.value,
        "message": failure.message,
        "traceback": failure.traceback,
    }


# -- evidence --------------------------------------------------------------------------------------


def transition_columns(t: Transition) -> dict[str, Any]:
    """Everything but prompt, messages, tools and position in the tree."""
    return {
        "id": t.id,
        "attempt": t.attempt,
        "index": t.index,
        "role": t.role,
        "policy": t.policy,
        "version": t.version,
        "finish": t.finish,
        "exact": t.exact,
        "span": t.span,
        "started": t.started,
        "seconds": t.seconds,
        "repeats": t.repeats,
        "sampling": to_json(t.sampling, "sampling"),
        "completion": to_blob(t.completion),
        "logprobs": to_blob(t.logprobs),
        "answer": None
        if t.answer is None
        else to_json(t.answer, f"The answer of transition {t.id}"),
    }


def transitions(rows: Sequence[DatabaseRow]) -> dict[str, list[Transition]]:
    """By attempt, in order of index. `rows` holds whole attempts in order of arrival, so that
    every parent comes before its children."""
    tokens: dict[int, bytes] = {}
    chats: dict[int, list[dict[str, Json]]] = {}
    found: dict[str, list[Transition]] = {}
    for row in rows:
        prompt = tokens.get(row["parent"], b"") + row["prompt"]
        tokens[row["seq"]] = prompt + row["completion"]
        messages = chats.get(row["chat_parent"], [])[: row["chat_shared"]] + from_json(
            row["messages"]
        )
        answer = from_json(row["answer"])
        chats[row["seq"]] = messages if answer is None else [*messages, answer]
        if not row["late"]:
            made = _transition(row, prompt, messages, answer)
            found.setdefault(row["attempt_id"], []).append(made)
    for calls in found.values():
        calls.sort(key=lambda call: call.index)
    return found


def _transition(
    row: DatabaseRow, prompt: bytes, messages: list[dict[str, Json]], answer: dict[str, Json] | None
) -> Transition:
    return Transition(
        id=row["id"],
        attempt=row["attempt_id"],
        index=row["position"],
        prompt=from_blob("i", prompt),
        completion=from_blob("i", row["completion"]),
        logprobs=from_blob("f", row["logprobs"]),
        role=row["role"],
        policy=row["policy"],
        version=row["version"],
        sampling=msgspec.json.decode(row["sampling"], type=Sampling),
        finish=row["finish"],
        exact=bool(row["exact"]),
        messages=messages,
        tools=from_json(row["tools_body"]) or [],
        answer=answer,
        span=row["span_id"],
        started=row["started_at"],
        seconds=row["seconds"],
        repeats=row["repeats"],
    )


def span_columns(span: Span, *, late: bool) -> dict[str, Any]:
    return {
        "attempt": span.attempt,
        "id": span.id,
        "parent": span.parent,
        "name": storable_text(span.name),
        "kind": span.kind,
        "start": span.start,
        "end": span.end,
        "ok": span.ok,
        "late": late,
        "attributes": to_json(span.attributes, f"The attributes of span {span.name!r}"),
    }


def span(row: DatabaseRow) -> Span:
    return Span(
        id=row["id"],
        attempt=row["attempt_id"],
        parent=row["parent_id"],
        name=row["name"],
        kind=row["kind"],
        start=row["started_at"],
        end=row["ended_at"],
        ok=bool(row["ok"]),
        attributes=from_json(row["attributes"]),
    )


def clean_outcome(outcome: Outcome) -> Outcome:
    """With the text that came from the agent as it can be stored."""
    failure, replace = outcome.failure, msgspec.structs.replace
    if failure is not None:
        message, traceback = storable_text(failure.message), storable_text(failure.traceback)
        failure = replace(failure, message=message, traceback=traceback)
    spans = [replace(span, name=storable_text(span.name)) for span in outcome.spans]
    return replace(outcome, failure=failure, spans=spans)


def reward_columns(
    attempt: str, position: int, reward: Reward, *, late: bool = False, step: int | None = None
) -> dict[str, Any]:
    """step: the training step that gave it; none: it came with the attempt."""
    return {
        "attempt": attempt,
        "late": late,
        "position": position,
        "scope": reward.scope.value,
        "target": reward.target,
        "name": reward.name,
        "value": reward.value,
        "source": reward.source,
        "step": step,
    }


def reward(row: DatabaseRow) -> Reward:
    return Reward(
        value=row["value"],
        name=row["name"],
        scope=Scope(row["scope"]),
        target=row["target"],
        source=row["source"],
    )


# -- credit ----------------------------------------------------------------------------------------

CREDIT = ("advantage", "baseline", "gate", "weight", "psi")


def credit_columns(credit: Credit) -> dict[str, Any]:
    """All but the step and the number of the call."""
    numbers = {name: to_blob(getattr(credit, name)) for name in CREDIT}
    return {"id": credit.transition, "policy": credit.policy, **numbers}


def credit(row: DatabaseRow) -> Credit:
    numbers = {name: from_blob("f", row[name]) for name in CREDIT}
    return Credit(transition=row["id"], policy=row["policy"], **numbers)
