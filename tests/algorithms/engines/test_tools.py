from __future__ import annotations

import pytest

from agentrl.algorithms.model.tool_parser import ToolCall, ToolParser, parse

CALL = '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT 1"}}\n</tool_call>'

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
]


@pytest.mark.parametrize(("text", "content", "names"), CASES)
def test_content_and_calls(text: str, content: str, names: list[str]) -> None:
    found, calls = parse(text)
    assert found == content
    assert [call.function.name for call in calls] == names


@pytest.mark.parametrize(("text", "content", "names"), CASES)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_stream_says_the_same(text: str, content: str, names: list[str], size: int) -> None:
    parser = ToolParser()
    found: list[str | ToolCall] = []
    for start in range(0, len(text), size):
        found += parser.push(text[start : start + size])
    found += parser.finish()
    assert "".join(part for part in found if isinstance(part, str)) == content
    assert [part.function.name for part in found if isinstance(part, ToolCall)] == names
    assert parser.count == len(names)


def test_plain_text_is_not_held_back() -> None:
    parser = ToolParser()
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" <b>") == [" <b>"]


def test_arguments_are_what_the_model_wrote_and_ids_are_unique() -> None:
    _, calls = parse(CALL + '<tool_call>{"arguments":{"a" :1},"name":"b"}</tool_call>')
    assert [call.function.arguments for call in calls] == ['{"sql": "SELECT 1"}', '{"a" :1}']
    assert len({call.id for call in calls}) == 2
