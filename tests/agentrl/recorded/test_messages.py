"""Messages as clients and tracers write them: nothing of an answer is lost, doubled or moved."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.recorded.messages import (
    answer_of,
    content_text,
    finish_of,
    has_failed,
    messages_of,
    result_text,
    tools_of,
)

USER = {"role": "user", "content": "hi"}


def called(name: str, arguments: str, id: str = "c1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def ai(**fields: Any) -> dict[str, Any]:
    kind = ["langchain", "schema", "messages", "AIMessage"]
    return {"lc": 1, "type": "constructor", "id": kind, "kwargs": {"type": "ai", **fields}}


CALL = {"name": "look", "args": {"at": "x"}, "id": "c1", "type": "tool_call"}
TEXT = {"type": "text", "text": "ok"}
SAID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "streamed tool use of Anthropic": (
        ai(
            content=[
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                TEXT,
                {"type": "tool_use", "id": "c1", "name": "look", "input": {}, "partial_json": "{"},
            ],
            tool_calls=[CALL],
        ),
        {"content": "ok", "reasoning_content": "hm", "tool_calls": [called("look", '{"at": "x"}')]},
    ),
    "streamed tool use without a field": (
        {
            "role": "assistant",
            "content": [
                {
                    "type": "tool_use",
                    "id": "c1",
                    "name": "look",
                    "input": {},
                    "partial_json": '{"at":1}',
                }
            ],
        },
        {"content": None, "tool_calls": [called("look", '{"at":1}')]},
    ),
    "parts of the Responses API": (
        ai(
            content=[
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                TEXT,
                {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c1"},
            ],
            tool_calls=[CALL],
        ),
        {"content": "ok", "reasoning_content": "hm", "tool_calls": [called("look", '{"at": "x"}')]},
    ),
    "content blocks of LangChain, one call cut off": (
        ai(
            content=[
                {"type": "reasoning", "reasoning": "hm"},
                CALL,
                {"type": "invalid_tool_call", "name": "look", "args": '{"a', "id": "c2"},
            ],
            tool_calls=[CALL],
            invalid_tool_calls=[{"name": "look", "args": '{"a', "id": "c2"}],
        ),
        {
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [called("look", '{"at": "x"}'), called("look", '{"a', "c2")],
        },
    ),
    "an invalid call alone": (
        ai(content="", invalid_tool_calls=[{"name": "look", "args": '{"a', "id": "c1"}]),
        {"content": None, "tool_calls": [called("look", '{"a')]},
    ),
    "Bedrock through LangChain": (
        ai(content=[{"type": "reasoning_content", "reasoning_content": {"text": "hm"}}, TEXT]),
        {"content": "ok", "reasoning_content": "hm"},
    ),
    "Bedrock itself": (
        {
            "role": "assistant",
            "content": [
                {"reasoningContent": {"reasoningText": {"text": "hm"}}},
                {"text": "ok"},
                {"toolUse": {"toolUseId": "c1", "name": "look", "input": {"at": "x"}}},
            ],
        },
        {"content": "ok", "reasoning_content": "hm", "tool_calls": [called("look", '{"at": "x"}')]},
    ),
    "thoughts of Mistral": (
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, TEXT],
        },
        {"content": "ok", "reasoning_content": "hm"},
    ),
    "thoughts twice": (
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, TEXT],
            "reasoning_content": "hm",
        },
        {"content": "ok", "reasoning_content": "hm"},
    ),
    "thoughts of gpt-oss": (
        {"role": "assistant", "content": "ok", "thinking": "hm"},
        {"content": "ok", "reasoning_content": "hm"},
    ),
    "details of OpenRouter": (
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
        },
        {"content": "ok", "reasoning_content": "hm"},
    ),
    "Gemini through LangChain, a call twice": (
        ai(
            content="",
            tool_calls=[CALL],
            additional_kwargs={"function_call": {"name": "look", "arguments": '{"at": "x"}'}},
        ),
        {"content": None, "tool_calls": [called("look", '{"at": "x"}')]},
    ),
    "Gemini itself": (
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True},
                {"text": "ok"},
                {"function_call": {"id": "c1", "name": "look", "args": {"at": "x"}}},
            ],
        },
        {"content": "ok", "reasoning_content": "hm", "tool_calls": [called("look", '{"at": "x"}')]},
    ),
    "Vercel's AI SDK": (
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "text": "hm"},
                {"type": "tool-call", "toolCallId": "c1", "toolName": "look", "input": {"at": "x"}},
            ],
        },
        {"content": None, "reasoning_content": "hm", "tool_calls": [called("look", '{"at": "x"}')]},
    ),
    "a call of ShareGPT": (
        {"role": "function_call", "value": '{"name": "look", "arguments": {"at": "x"}}'},
        {"content": None, "tool_calls": [called("look", '{"at": "x"}', "call_1_0")]},
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_an_answer_keeps_text_thoughts_and_calls(name: str) -> None:
    given, expected = SAID[name]
    asked = messages_of([USER, given])
    assert asked == [USER, {"role": "assistant", **expected}]


RESULTS: dict[str, dict[str, Any]] = {
    "Gemini": {"role": "user", "parts": [{"functionResponse": {"name": "a", "response": "one"}}]},
    "google-genai": {"role": "tool", "parts": [{"function_response": {"response": "one"}}]},
    "Bedrock": {
        "role": "user",
        "content": [{"toolResult": {"toolUseId": "c1", "content": [{"text": "one"}]}}],
    },
    "Vercel": {
        "role": "tool",
        "content": [
            {
                "type": "tool-result",
                "toolCallId": "c1",
                "toolName": "a",
                "output": {"type": "text", "value": "one"},
            }
        ],
    },
    "ShareGPT": {"role": "observation", "value": "one"},
    "OpenInference, of Anthropic": {"role": "user", "tool_call_id": "c1", "content": "one"},
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_a_message_of_its_tool(name: str) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [called("a", "{}")]}
    found = messages_of([USER, call, RESULTS[name]])[-1]
    assert (found["role"], found["tool_call_id"], found["content"]) == ("tool", "c1", "one")


def test_results_without_ids_belong_to_their_calls() -> None:
    """By the names of tools, or else in their order."""
    calls = [{"name": name, "arguments": {"n": n}} for n, name in enumerate("aab")]
    for named in (True, False):
        order = (2, 0, 1) if named else (0, 1, 2)
        results = [{"role": "tool", "content": f"r{n}"} for n in order]
        if named:
            results = [r | {"name": "aab"[n]} for r, n in zip(results, order, strict=True)]
        found = messages_of([USER, {"role": "assistant", "tool_calls": calls}, *results])
        ids = [call["id"] for call in found[1]["tool_calls"]]
        assert len(set(ids)) == 3
        answers = {m["tool_call_id"]: m["content"] for m in found[2:]}
        assert [answers[id] for id in ids] == ["r0", "r1", "r2"]


def test_neighbouring_items_are_one_message() -> None:
    """Reasoning, then text, then a call: one answer, also where a server's tool is between."""
    items: list[Any] = [
        USER,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    ]
    _, first, result, second = messages_of(items)
    assert first == {
        "role": "assistant", "content": "a", "reasoning_content": "hm",
        "tool_calls": [called("look", "{}")],
    }  # fmt: skip
    assert result["content"] == "r"
    assert second["content"] == [items[5], {"type": "text", "text": "b"}]  # nothing is dropped here
    assert answer_of(items[5:]) == second
    two = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert messages_of([USER, *two])[1:] == two  # chat completions do not merge


def test_items_of_new_kinds_are_calls_and_results() -> None:
    """Calls with an id are of tools that the client runs."""
    screen = {"type": "computer_screenshot", "image_url": "data:image/png;base64,QQ=="}
    items: list[Any] = [
        USER,
        {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
        {"type": "computer_call", "call_id": "c2", "action": {"type": "screenshot"}},
        {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a"}]},
        {"type": "computer_call_output", "call_id": "c2", "output": screen},
    ]
    _, answer, first, second = messages_of(items)
    calls = [(c["id"], c["function"]["name"]) for c in answer["tool_calls"]]
    assert calls == [("c1", "shell_call"), ("c2", "computer_call")]
    assert (first["tool_call_id"], first["content"]) == ("c1", '[{"stdout": "a"}]')
    assert second["content"][0]["image_url"]["url"] == screen["image_url"]


def test_parts_alone_are_a_question() -> None:
    assert messages_of([{"type": "text", "text": "hi"}]) == [USER]


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ('{"city": "Paris"}', '{"city": "Paris"}'),  # the model's own text
        ('{"response": "Paris"}', '{"response": "Paris"}'),
        ('["a","b"]', '["a","b"]'),
        ({"city": "Paris", "text": "x"}, '{"city": "Paris", "text": "x"}'),
        ({"response": "Paris"}, "Paris"),
        ({"completion": "Paris"}, "Paris"),
        ({"text": "Paris"}, "Paris"),
        (["a", "b"], '["a", "b"]'),
        ([["a"], ["b"]], '[["a"], ["b"]]'),
        ([{"type": "text", "text": "x"}], "x"),
        ({"content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn"}, "x"),
        ([[{"text": "x", "message": {"role": "assistant", "content": "x"}}]], "x"),
        (42, "42"),
        ({"candidates": [{"content": {"role": "model", "parts": [{"text": "x"}]}}]}, "x"),
        ('{"role": "assistant", "content": "x"}', "x"),
    ],
)
def test_data_is_an_answer_in_json(given: Any, content: str) -> None:
    assert answer_of(given) == {"role": "assistant", "content": content}


def test_an_answer_without_a_role_keeps_its_calls() -> None:
    found = answer_of({"content": None, "tool_calls": [called("look", "{}")]})
    assert found == {"role": "assistant", "content": None, "tool_calls": [called("look", "{}")]}


@pytest.mark.parametrize(
    "given", [{"question": "why?", "n": 2}, '{"question": "why?", "n": 2}', '["why?"]']
)
def test_data_is_a_question_in_json(given: Any) -> None:
    (found,) = messages_of(given)
    assert found["role"] == "user"
    assert "why?" in found["content"]
    assert found["content"][0] in "[{"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["a.py", "b.py"], '["a.py", "b.py"]'),  # not a.pyb.py
        ('["a.py","b.py"]', '["a.py","b.py"]'),
        ([{"text": "A", "score": 1}], '[{"text": "A", "score": 1}]'),
        ([{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], "AB"),
        ([{"type": "text", "text": "A"}, {"type": "image_url", "image_url": {}}], "A[image]"),
        ({"role": "tool", "content": "A", "tool_call_id": "c"}, "A"),
        ('{"content": "A", "type": "tool", "tool_call_id": "c"}', "A"),
        ('{"content":"A"}', '{"content":"A"}'),
        ('{"type": "tool", "data": {"content": ["a", "b"], "tool_call_id": "c"}}', '["a", "b"]'),
    ],
)
def test_results_of_tools_stay_as_they_are(given: Any, text: str) -> None:
    assert result_text(given) == text
    if not isinstance(given, str):
        assert content_text(given) == text


def test_tools_of_every_client_have_names_and_parameters() -> None:
    schema = {"type": "object"}
    made = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    for given in (
        {"function_tools": [{"name": "look", "parameters_json_schema": schema}]},  # Pydantic AI
        [{"function_declarations": [{"name": "look", "parameters": schema}]}],  # Google
        {"name": "look", "parameters": schema},
        {"look": {"inputSchema": schema}},
    ):
        assert tools_of(given) == made


def generations(metadata: dict[str, Any]) -> dict[str, Any]:
    return {"generations": [[{"text": "", "message": ai(response_metadata=metadata)}]]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"choices": [{"finish_reason": "length", "message": {}}]}, "length"),
        ({"candidates": [{"finishReason": "MAX_TOKENS", "content": {}}]}, "MAX_TOKENS"),
        ({"role": "assistant", "content": [], "stop_reason": "max_tokens"}, "max_tokens"),
        ({"output": {}, "stopReason": "max_tokens"}, "max_tokens"),
        (generations({"stopReason": "max_tokens"}), "max_tokens"),  # Bedrock
        (generations({"incomplete_details": {"reason": "max_output_tokens"}}), "max_output_tokens"),
        ({"role": "assistant", "response_metadata": {"finish_reason": "length"}}, "length"),
        ({"content": "ok"}, ""),
    ],
)
def test_why_an_answer_ended_is_found(body: dict[str, Any], reason: str) -> None:
    """An answer that was cut off is not imitated."""
    assert finish_of(body) == reason


def test_a_tool_that_caught_its_error_has_failed() -> None:
    message = {"type": "tool", "content": "no", "tool_call_id": "c", "status": "error"}
    for output in (message, {"output": message}, {"output": {"lc": 1, "kwargs": message}}):
        assert has_failed(output)
    assert not has_failed({"status": "error"})  # what the tool has found


IMAGES: dict[str, dict[str, Any]] = {
    "Anthropic": {"type": "image", "source": {"media_type": "image/png", "data": "QQ=="}},
    "Responses": {"type": "input_image", "image_url": "data:image/png;base64,QQ=="},
    "LangChain": {"type": "image", "base64": "QQ==", "mime_type": "image/png"},
    "LangChain before 1": {"type": "image", "source_type": "base64", "data": "QQ=="},
    "Google": {"inlineData": {"mimeType": "image/png", "data": "QQ=="}},
    "OpenTelemetry": {"type": "blob", "modality": "image", "content": "QQ=="},
    "Vercel": {"type": "file", "mediaType": "image/png", "data": "QQ=="},
    "OpenInference": {"type": "image", "image_url": {"url": "data:image/png;base64,QQ=="}},
    "MCP": {"type": "image", "mimeType": "image/png", "data": "QQ=="},
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_every_client_are_images(name: str) -> None:
    (found,) = messages_of([{"role": "user", "content": [IMAGES[name]]}])
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
    assert found["content"] == [shown]


def test_a_part_that_is_no_image_stays() -> None:
    part = {"type": "file", "mediaType": "application/pdf", "data": "QQ=="}
    assert messages_of([{"role": "user", "content": [part]}])[0]["content"] == [part]
