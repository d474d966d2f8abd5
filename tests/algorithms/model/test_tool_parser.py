from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.algorithms.model.tool_formats import ToolCall, ToolParser

CALL = '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT 1"}}\n</tool_call>'
UNQUOTED = '<tool_call>{"name": "a", "arguments": {"b": "c}}</tool_call>'

CASES = [
    ("hello", "hello", []),
    (" two  spaces \n", " two  spaces \n", []),
    (CALL, "", ["query"]),
    (f"Let me look.\n{CALL}", "Let me look.", ["query"]),
    (f"{CALL}\n{CALL}", "", ["query", "query"]),
    (f"{CALL}\n\nafter", "after", ["query"]),
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ('<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>', []),
    ('<tool_call>{"name": "a", "arguments": 3}</tool_call>',) * 2 + ([],),
    ('x <tool_call>{"name": "a", "argu', 'x <tool_call>{"name": "a", "argu', []),
    (f"<tool_call>bad</tool_call>{CALL}", "<tool_call>bad</tool_call>", ["query"]),
    ('<tool_call>{"name": "a", "arguments": {}}', "", ["a"]),  # only the closing tag is missing
    ("a < b <tool", "a < b <tool", []),
    ("<tool_call><tool_call>{}</tool_call>",) * 2 + ([],),
    (f"Write <tool_call> first.\n{CALL}", "Write <tool_call> first.", ["query"]),
    (f'Write "<tool_call>" first.\n{CALL}', 'Write "<tool_call>" first.', ["query"]),
    (f"{UNQUOTED}\n{CALL}", UNQUOTED, ["query"]),
    (f"<think>I would write {CALL} now.</think>Done.",) * 2 + ([],),
    (f"<think><tool_call></think>\n{CALL}", "<think><tool_call></think>", ["query"]),
    (f"<think>still {CALL}",) * 2 + ([],),
    ("\n<thin", "\n<thin", []),
    ('<tool_call>{"name": "a", "arguments": ' + "[" * 100_000,) * 2 + ([],),
]

STRINGS = [
    "ends with </tool_call> here",
    "</tool_call>",
    "<tool_call> and </tool_call>",
    "</tool_call></tool_call>\\",
    'said "</tool_call>", and } ] { [',
    'escaped \\"</tool_call>\\\\" twice',
    "two\nlines </tool_call>\n<tool_call>\n{}",
    'a call <tool_call>\n{"name": "b", "arguments": {}}\n</tool_call> inside',
    "<think></think></tool_",
    "\u00e9 \U0001f600 </tool_call>",
]


@pytest.mark.parametrize(("text", "content", "names"), CASES)
def test_content_and_calls(text: str, content: str, names: list[str]) -> None:
    found, calls = ToolParser().whole(text)
    assert found == content
    assert [call.function.name for call in calls] == names


@pytest.mark.parametrize(("text", "content", "names"), CASES)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_stream_says_the_same(text: str, content: str, names: list[str], size: int) -> None:
    found = chunked(text, size)
    assert "".join(part for part in found if isinstance(part, str)) == content
    assert [part.function.name for part in found if isinstance(part, ToolCall)] == names


def chunked(text: str, size: int) -> list[str | ToolCall]:
    parser = ToolParser()
    found: list[str | ToolCall] = []
    for start in range(0, len(text), size):
        found += parser.push(text[start : start + size])
    return found + parser.finish()


@pytest.mark.parametrize("string", STRINGS)
@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("where", ["value", "key", "list"])
def test_tags_in_a_string_are_part_of_it(string: str, size: int, where: str) -> None:
    argument: Any = {"value": {"text": string}, "key": {string: 1}, "list": {"a": [[string], {}]}}
    first, second = json.dumps(argument[where]), json.dumps({"b": string}, ensure_ascii=False)
    text = "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'
        for name, arguments in (("one", first), ("two", second), ("three", "{}"))
    )
    parts = chunked(f"Look.\n{text}after", size)
    assert "".join(part for part in parts if isinstance(part, str)) == "Look.\nafter"
    functions = [part.function for part in parts if isinstance(part, ToolCall)]
    found = [(function.name, function.arguments) for function in functions]
    assert found == [("one", first), ("two", second), ("three", "{}")]


@pytest.mark.parametrize("string", STRINGS)
@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_a_call_that_the_token_limit_cuts_is_content(string: str, size: int) -> None:
    call = f'<tool_call>{{"name": "a", "arguments": {{"text": {json.dumps(string)}}}}}</tool_call>'
    for end in range(call.index("text"), len(call) - len("}}</tool_call>")):
        cut = CALL + call[:end]
        found = chunked(cut, size)
        assert isinstance(found[0], ToolCall)
        assert "".join(map(str, found[1:])) == call[:end]
    assert all(isinstance(part, ToolCall) for part in chunked(call[: -len("_call>")], size))


def test_reasoning_that_the_prompt_has_opened_has_no_calls() -> None:
    content, calls = ToolParser(thinking=True).whole(f"I would write {CALL}</think>{CALL}")
    assert content == f"I would write {CALL}</think>"
    assert len(calls) == 1


def test_plain_text_is_not_held_back() -> None:
    parser = ToolParser()
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" <b>") == [" <b>"]


def test_arguments_are_what_the_model_wrote_and_ids_are_unique() -> None:
    other = '<tool_call>{"arguments":{"a" :1},"name":"b"}</tool_call>'
    _, calls = ToolParser().whole(CALL + other)
    assert [call.function.arguments for call in calls] == ['{"sql": "SELECT 1"}', '{"a" :1}']
    assert len({call.id for call in calls}) == 2
