"""A conversation is recognised whether the gateway looks at all of it or at what is new."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.runners.apis import chat
from agentrl.runners.apis.chat import Body, ConversationMemory

USER: Body = {"role": "user", "content": "Add one and two."}


def called(arguments: str, id: str = "call_1") -> Body:
    function = {"name": "add", "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(id: str = "call_1") -> Body:
    return {"role": "tool", "tool_call_id": id, "content": "3"}


def recall(memory: ConversationMemory, messages: list[Body]) -> tuple[list[Any], int]:
    return memory.recall(messages, joined=False, raw=json.dumps(messages).encode())


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages that are looked at."""
    found: list[Any] = []
    next_key = chat._next_key

    def counted(key: int, message: Any) -> int:
        found.append(message)
        return next_key(key, message)

    monkeypatch.setattr(chat, "_next_key", counted)
    return found


def test_a_longer_conversation_is_looked_at_from_where_it_was_known(walked: list[Any]) -> None:
    memory, said = ConversationMemory(), [USER]
    for number in range(5):
        _, key = recall(memory, said)
        answer = called('{"a": 1,  "b": 2}', f"call_{number}")
        memory.remember(answer, key)
        said = [*said, answer, result(f"call_{number}")]
    assert walked == [USER, *said[1:-2]]


def test_a_conversation_that_goes_on_otherwise_is_looked_at_anew(walked: list[Any]) -> None:
    memory, other = ConversationMemory(), {"role": "user", "content": "Add two and two."}
    recall(memory, [USER])
    recall(memory, [other, called("{}"), result()])
    assert walked == [USER, other, called("{}"), result()]


def test_an_answer_in_the_middle_is_found_though_it_came_later() -> None:
    """A call that the agent gave up, and whose answer came when the conversation had gone on."""
    memory = ConversationMemory()
    _, key = recall(memory, [USER])
    sent = called('{"a":1}')
    longer = [USER, sent, result()]
    recall(memory, longer)
    memory.remember(called('{"a": 1}'), key)
    found, _ = recall(memory, [*longer, USER])
    assert found[1] == called('{"a": 1}')


def test_what_follows_an_assistants_message_may_belong_to_it() -> None:
    memory = ConversationMemory()
    _, key = recall(memory, [USER])
    memory.remember(called("{}") | {"content": "I add."}, key)
    first: Body = {"role": "assistant", "content": "I add."}
    recall(memory, [USER, first])
    found, _ = recall(memory, [USER, first, called("{}"), result()])
    assert found == [USER, called("{}") | {"content": "I add."}, result()]


TEXTS = st.sampled_from(["", "a", "b"])
ARGUMENTS = st.sampled_from(["{}", '{"a":1}', '{"a": 1}', "{"])
SAID = st.builds(lambda text: {"role": "assistant", "content": text}, TEXTS)
ASKED = st.builds(lambda text: {"role": "user", "content": text}, TEXTS)
MESSAGES = st.one_of(SAID, ASKED, ASKED, st.builds(called, ARGUMENTS), st.sampled_from([1, None]))
TIMES = st.lists(st.tuples(st.integers(0, 8), ARGUMENTS, st.booleans()), max_size=6)


@given(st.lists(MESSAGES, max_size=8), TIMES)
def test_it_makes_no_difference_what_was_known(
    messages: list[Any], times: list[tuple[int, str, bool]]
) -> None:
    """Beginnings of a conversation in any order, with answers to some of them."""
    memory = ConversationMemory()
    for number, (length, arguments, answered) in enumerate(times):
        sent = messages[:length]
        anew = replace(memory, walked=None).recall(sent, joined=False)
        assert recall(memory, sent) == anew
        if answered:
            memory.remember(called(arguments, f"call_of_the_policy_{number}"), anew[1])
