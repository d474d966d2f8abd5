"""Whose call is it?"""

from __future__ import annotations

import secrets

import pytest

from agentrl.core.types import Attempt, NewRollout
from agentrl.runners.gateway import attribution
from agentrl.runners.gateway.attribution import (
    ActiveAttempt,
    AttemptRegistry,
    CallOrigin,
    RefusedError,
)

SPAN = "00f067aa0ba902b7"


@pytest.fixture
def attempts() -> AttemptRegistry:
    return AttemptRegistry()


def start(attempts: AttemptRegistry) -> ActiveAttempt:
    rollout = NewRollout(id="r", run="run", group="g", index=0, task={})
    return attempts.register(
        Attempt(id=secrets.token_hex(16), rollout=rollout, fence=1, lease_until=0.0)
    )


def parent(attempt: str) -> dict[str, str]:
    return {"traceparent": f"00-{attempt}-{SPAN}-01"}


def key(attempt: str) -> dict[str, str]:
    return {"authorization": f"Bearer {attempt}"}


def test_path_before_traceparent_before_key(attempts: AttemptRegistry) -> None:
    a, b, c = (start(attempts) for _ in range(3))
    headers = parent(b.id) | key(c.id)
    assert attempts.caller(headers, {"attempt": a.id}) == CallOrigin(a, None, SPAN)
    assert attempts.caller(headers, {}) == CallOrigin(b, None, SPAN)
    assert attempts.caller(key(c.id), {}) == CallOrigin(c, None, None)


def test_a_foreign_trace_does_not_hide_the_key(attempts: AttemptRegistry) -> None:
    active = start(attempts)
    headers = parent(secrets.token_hex(16)) | key(active.id)
    assert attempts.caller(headers, {}).active is active


def test_role_by_path_or_baggage(attempts: AttemptRegistry) -> None:
    active = start(attempts)
    headers = key(active.id) | {"baggage": "x=1, agentrl.role=the%20critic+a;p=2"}
    assert attempts.caller(headers, {}).role == "the critic a"
    path = {"attempt": active.id, "role": "solver"}
    assert attempts.caller(headers, path).role == "solver"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        key(""),
        key("sk-123"),
        {"traceparent": "junk"},
        {"traceparent": "00--x-1"},
        parent("0" * 32),
    ],
)
def test_nobodys_call_is_refused_with_advice(
    attempts: AttemptRegistry, headers: dict[str, str]
) -> None:
    start(attempts)
    with pytest.raises(RefusedError, match="belongs to no rollout") as refused:
        attempts.caller(headers, {})
    assert refused.value.status == 401


def test_ended_and_unknown_attempts(attempts: AttemptRegistry) -> None:
    active = start(attempts)
    attempts.unregister(active.id)
    for headers, path in (
        (key(active.id), {}),
        (parent(active.id), {}),
        ({}, {"attempt": active.id}),
    ):
        with pytest.raises(RefusedError, match="has ended") as refused:
            attempts.caller(headers, path)
        assert refused.value.status == 403
    with pytest.raises(RefusedError, match="there is no attempt") as refused:
        attempts.caller({}, {"attempt": "nobody"})
    assert refused.value.status == 404


def test_memory_of_ended_attempts_is_bounded(
    attempts: AttemptRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "REMEMBERED_ATTEMPTS", 2)
    lives = [start(attempts) for _ in range(4)]
    for active in lives:
        attempts.unregister(active.id)
    codes = []
    for active in lives:
        with pytest.raises(RefusedError) as refused:
            attempts.find(active.id)
        codes.append(refused.value.status)
    assert codes == [404, 404, 403, 403]


@pytest.mark.parametrize("span", ["x" * 16, "0" * 16, "A" * 16, "", "1" * 15, "é" * 16, " " * 16])
def test_a_span_that_is_no_span_is_left_out(attempts: AttemptRegistry, span: str) -> None:
    active = start(attempts)
    headers = {"traceparent": f"00-{active.id}-{span}-01"}
    assert attempts.caller(headers, {}) == CallOrigin(active, None, None)
    assert attempts.caller(parent(active.id), {}) == CallOrigin(active, None, SPAN)
