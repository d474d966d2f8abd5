"""From stored calls to signals: what came next in three shapes of messages, and feedback."""

from __future__ import annotations

import pytest

from agentrl.core.types import CORRECTION, FEEDBACK, Reward, Scope
from agentrl.live.signals import (
    digest_of_session,
    invalid_reason,
    posted,
    replies,
    result_of,
    task_of,
)
from agentrl.runners.feedback import Feedback
from tests import factories


def call(id, messages, answer, **more):
    return factories.call(id, [1], [2], attempt="a", messages=messages, answer=answer, **more)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


TOOL = {"id": "t1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
OPENAI = (
    [{"role": "system", "content": "it is 9:00"}, user("where is 7?")],
    {"role": "assistant", "content": None, "tool_calls": [TOOL]},
    [{"role": "tool", "tool_call_id": "t1", "content": "Error: no order"}],
)
ANTHROPIC = (
    [{"role": "user", "content": [{"type": "text", "text": "where is 7?"}]}],
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "find"}]},
    [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Error: no order"}],
        }
    ],
)
GEMINI = (
    [{"role": "user", "parts": [{"text": "where is 7?"}]}],
    {"role": "model", "parts": [{"functionCall": {"name": "find", "args": {}}}]},
    [
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "find", "response": {"error": "no order"}}}],
        }
    ],
)


@pytest.mark.parametrize("shape", [OPENAI, ANTHROPIC, GEMINI])
def test_a_tool_result_and_a_next_message_follow_their_answers(shape):
    start, answer, result = shape
    then = [*start, answer, *result]
    if start[0]["role"] == "system":  # agents write the time anew
        then[0] = {"role": "system", "content": "it is 9:01"}
    last = {"role": answer["role"], "content": "I cannot find it."}
    thanks = user("No! I said 7.")
    calls = [
        call("c0", start, answer),
        call("c1", then, last),
        call("c2", [*then, last, thanks], said("Sorry.")),
    ]
    first, second = replies(calls)
    assert (first.call, first.next) == ("c0", result)
    assert (second.call, second.next, second.answer) == ("c1", [thanks], last)


def test_only_a_call_that_goes_on_with_the_answer_is_its_successor():
    """Sub-agents, and answers that were asked for again, have conversations of their own."""
    calls = [
        call("c0", [user("a")], said("one")),
        call("c1", [user("a")], said("two")),
        call("sub", [user("other")], said("x")),
        call("c2", [user("a"), said("two"), user("why?")], said("because")),
        call("c3", [user("a"), said(" two "), user("again")], said("because")),
    ]
    (found,) = replies(calls)
    assert (found.call, found.next) == ("c1", [user("why?")])
    assert replies([]) == []


def test_messages_that_are_odd_are_read_as_far_as_they_can_be():
    odd = [{"role": "user"}, {"content": 3}, {"role": "user", "content": [None, 4, {"text": 5}]}]
    calls = [
        call("c0", odd, {"role": "assistant"}),
        call("c1", [*odd, said("x"), {"role": "tool", "content": None}], None),
    ]
    (found,) = replies(calls)
    assert found.next == [{"role": "tool", "content": None}]
    assert (task_of(calls), result_of(calls)) == ({"input": ""}, "")


def test_task_and_result_are_the_first_and_last_words():
    calls = [
        call("c0", [user("where is 7?")], said("Here.")),
        call("c1", [user("where is 7?"), said("Here."), user("thanks")], said("")),
    ]
    assert (task_of(calls), result_of(calls)) == ({"input": "where is 7?"}, "Here.")


def test_posted_values_are_of_the_session_before_those_of_its_calls():
    def given(name, value, target=None, source=FEEDBACK):
        scope = Scope.ROLLOUT if target is None else Scope.TRANSITION
        return Reward(name=name, value=value, scope=scope, target=target, source=source)

    rows = [
        given(FEEDBACK, 0.0, "c0"), given(FEEDBACK, 1.0, "c1"), given(CORRECTION, 0.0, "c1"),
        given("bought", 1.0), given("bought", 0.0, "c0"), given("huge", 7.0),
        given("verifier", 1.0), given("other", 1.0, source="verifier"),
    ]  # fmt: skip
    assert posted(rows) == {FEEDBACK: 0.5, CORRECTION: 0.0, "bought": 1.0}


def test_a_repeated_session_has_the_same_digest_whatever_was_answered():
    one = [call("c0", [user("a")], said("x")), call("c1", [user("a"), said("x"), user("b")], None)]
    two = [call("d0", [user("a")], said("y")), call("d1", [user("a"), said("y"), user("b")], None)]
    assert digest_of_session(one) == digest_of_session(two)
    assert digest_of_session(one[:1]) != digest_of_session(one)


@pytest.mark.parametrize(
    "name", ["outcome", "hindsight", "turn", "verifier", "signal", "failed", "correction"]
)
def test_feedback_has_no_name_of_what_a_run_makes_itself(name: str) -> None:
    assert "choose another" in invalid_reason(Feedback(session="s", name=name, value=1.0))
    assert not invalid_reason(Feedback(session="s", name="bought", value=1.0))


def test_feedback_has_a_size() -> None:
    for long in ({"name": "x" * 101}, {"note": "x" * 2**19}, {"correction": "x" * 2**19}):
        assert "at most" in invalid_reason(Feedback(**({"session": "s", "value": 1.0} | long)))
