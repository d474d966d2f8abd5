"""Google's generateContent: the upstream only ever sees chat completions."""

from __future__ import annotations

import json
from base64 import b64decode, urlsafe_b64encode
from typing import Any

import httpx
import pytest
from aiohttp import web

from agentrl.runners.apis import google
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.request import read_request
from tests.runners.conftest import rows

SCHEMA = {"type": "OBJECT", "properties": {"text": {"type": "STRING"}, "type": {"type": "ARRAY"}}}
PLAIN = {"type": "object", "properties": {"text": {"type": "string"}, "type": {"type": "array"}}}
DECLARED = [{"name": "f", "description": "d", "parameters": SCHEMA}]
DECLARED += [{"name": "g", "parametersJsonSchema": PLAIN}, {"name": "h"}]
USER = {"role": "user", "parts": [{"text": "hel"}, {"text": "lo"}]}
STREAM = "/models/m:streamGenerateContent?alt=sse"
WHOLE = "/models/m:generateContent"


@pytest.fixture
async def active(bench: Any) -> Any:
    return bench.gateway.register(await bench.attempt(), sealed=True)


@pytest.fixture
async def http(bench: Any, active: Any) -> Any:
    url, headers = bench.gateway.base_url, {"x-goog-api-key": active.key}
    async with httpx.AsyncClient(base_url=f"{url}beta", headers=headers) as client:
        yield client


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.text.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: {") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def call(arguments: str, thought: str = "") -> Any:
    function = {"name": "f", "arguments": arguments}
    made = {"role": "assistant", "content": None}
    made |= {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    return lambda body: made | ({"reasoning_content": thought} if thought else {})


async def test_calls_without_ids_are_answered_in_order(bench: Any, http: Any) -> None:
    made = [{"functionCall": {"name": "f", "args": {"text": t}}} for t in "ab"]
    told = [{"functionResponse": {"name": "f", "response": {"n": n}}} for n in (1, 2)]
    said = [USER, {"role": "model", "parts": made}, {"role": "function", "parts": told}]
    assert (await http.post(WHOLE, json={"contents": said})).status_code == 200
    _, turn, *results = bench.model.requests[0]["messages"]
    ids = [made["id"] for made in turn["tool_calls"]]
    assert [result["tool_call_id"] for result in results] == ids
    assert len(set(ids)) == 2
    assert [result["content"] for result in results] == ['{"n":1}', '{"n":2}']


INLINE = {"parts": [{"inlineData": {"mimeType": "audio/wav", "data": "aGk="}}]}


CALLED = {"name": "f", "args": {}}
BOTH = {"name": "f", "parameters": SCHEMA, "parameters_json_schema": PLAIN}
NAMES = {"allowedFunctionNames": ["g"]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"contents": [INLINE]}, "contents[0].parts[0]: a part with inlineData"),
        ({"contents": []}, "contents"),
        ({"contents": [USER], "cachedContent": "x"}, "cachedContent"),
        ({"contents": [USER], "generationConfig": {"candidateCount": 2}}, "generationConfig.cand"),
        ({"contents": [USER], "generationConfig": {"dice": 2}}, "generationConfig.dice"),
        ({"contents": [USER], "generationConfig": {"topK": 2.5}}, "generationConfig.topK"),
        ({"contents": [USER], "generationConfig": {"seed": True}}, "generationConfig.seed"),
        ({"contents": [USER], "tools": [{"computerUse": {}}]}, "tools[0]"),
        ({"contents": [{"role": "tool", "parts": []}]}, "contents[0].role"),
        ({"contents": 5}, "contents"),
        ({"contents": [USER], "systemInstruction": "be brief"}, "systemInstruction"),
        ({"contents": [USER, {"parts": [{"text": "x"}]}]}, "contents[1].role"),
        ({"contents": [{"role": "user", "parts": []}]}, "contents[0].parts"),
        ({"contents": [USER | {"turn": 1}]}, "contents[0].turn"),
        (
            {"contents": [{"parts": [{"text": "x", "functionCall": CALLED}]}]},
            "contents[0].parts[0]",
        ),
        ({"contents": [{"parts": [{"text": "x", "mood": "sad"}]}]}, "contents[0].parts[0].mood"),
        ({"contents": [{"parts": [{"functionCall": CALLED}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"functionResponse": {}}]}]}, "contents[0].parts[0].functionR"),
        (
            {"contents": [{"parts": [{"functionResponse": {"name": "f", "response": {}}}]}]},
            "contents[0].parts[0].functionResponse: there is no call of 'f' before this result",
        ),
        (
            {"contents": [USER, {"role": "model", "parts": [{"functionCall": {"args": "x"}}]}]},
            "contents[1].parts[0].functionCall.args",
        ),
        ({"contents": [USER], "cached_content": "x"}, "cachedContent"),
        ({"contents": [USER], "generation_config": {}, "generationConfig": {}}, "generationConfig"),
        (
            {"contents": [USER], "generationConfig": {"top_k": 1, "topK": 2}},
            "generationConfig.topK: is there twice",
        ),
        *(
            ({"contents": [USER], "generationConfig": {name: value}}, f"generationConfig.{name}: ")
            for name, value in (("seed", "--5"), ("seed", "5.0"), ("topK", 5.5), ("topK", True))
        ),
        (
            {
                "contents": [USER],
                "tools": [{"function_declarations": [{"name": "f", "schema": {}}]}],
            },
            "tools[0].functionDeclarations[0].schema",
        ),
        (
            {"contents": [USER], "tools": [{"functionDeclarations": [BOTH]}]},
            "tools[0].functionDecl",
        ),
        ({"contents": [USER], "tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDecl"),
        (
            {"contents": [USER], "toolConfig": {"functionCallingConfig": {"mode": "ANY"} | NAMES}},
            "toolConfig.functionCallingConfig: ['g'] are not among",
        ),
        (
            {"contents": [USER], "toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
            "toolConfig.functionCallingConfig",
        ),
    ],
)
async def test_what_google_cannot_say_is_refused(
    bench: Any, http: Any, body: dict[str, Any], param: str
) -> None:
    answer = await http.post(WHOLE, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert error["message"].startswith(param)
    assert bench.model.requests == []


# -- what clients send -----------------------------------------------------------------------------

NESTED = {
    "type": "OBJECT",
    "properties": {
        "any_of": {"any_of": [{"type": "STRING"}, {"type": "INTEGER"}], "nullable": True},
        "min_items": {"type": "ARRAY", "min_items": "1", "items": {"type": "STRING"}},
        "nullable": {"type": "STRING", "enum": ["STRING", "ARRAY"], "nullable": True},
        "number": {"type": "INTEGER", "format": "enum", "enum": ["1", "2"], "example": 1},
        "link": {"ref": "#/defs/Link"},
        "open": {"type": "OBJECT", "additional_properties": {"type": "NUMBER"}},
        "own": {"type": "OBJECT", "default": {"type": "STRING", "any_of": 1}},
    },
    "property_ordering": ["link", "any_of"],
    "defs": {"Link": {"type": "STRING"}},
    "required": ["any_of"],
}
CONVERTED = {
    "type": "object",
    "properties": {
        "link": {"$ref": "#/$defs/Link"},
        "any_of": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        "min_items": {"type": "array", "minItems": 1, "items": {"type": "string"}},
        "nullable": {"type": ["string", "null"], "enum": ["STRING", "ARRAY", None]},
        "number": {"type": "integer", "enum": [1, 2], "examples": [1]},
        "open": {"type": "object", "additionalProperties": {"type": "number"}},
        "own": {"type": "object", "default": {"type": "STRING", "any_of": 1}},
    },
    "required": ["any_of"],
    "$defs": {"Link": {"type": "string"}},
}


@pytest.mark.parametrize("name", ["parameters", "parameters_json_schema", "parametersJsonSchema"])
async def test_schemas_go_out_as_json_schema(bench: Any, http: Any, name: str) -> None:
    declared = {"name": "f", "description": "d", name: NESTED}
    config = {"response_schema": NESTED, "response_mime_type": "application/json"}
    body = {"contents": [USER], "tools": {"functionDeclarations": [declared]}}
    answer = await http.post(WHOLE, json=body | {"generation_config": config})
    assert answer.status_code == 200, answer.text
    (sent,) = bench.model.requests
    (tool,) = sent["tools"]
    assert tool["function"] == {"name": "f", "description": "d", "parameters": CONVERTED}
    assert [*tool["function"]["parameters"]["properties"]][:2] == ["link", "any_of"]
    assert sent["response_format"]["json_schema"]["schema"] == CONVERTED


async def test_whole_numbers_are_integers(bench: Any, active: Any, http: Any) -> None:
    """google-genai writes top_k = 5 as 5.0, which a policy server may refuse."""
    config = {"topK": 5.0, "maxOutputTokens": 9.0, "seed": "-3", "temperature": 1}
    answer = await http.post(WHOLE, json={"contents": [USER], "generationConfig": config})
    assert answer.status_code == 200, answer.text
    sent = bench.model.requests[0]
    numbers = [sent[name] for name in ("top_k", "max_completion_tokens", "seed")]
    assert (numbers, {type(number) for number in numbers}) == ([5, 9, -3], {int})
    (row,) = await rows(bench, active)
    assert (row.sampling.top_k, row.sampling.max_tokens, row.sampling.seed) == (5, 9, -3)


def test_both_spellings_of_fields_are_read() -> None:
    """Also in one body, as google-genai and Strands write it."""
    thinking = {"include_thoughts": True, "thinking_budget": 9, "thinking_level": "LOW"}
    config = {"max_output_tokens": 9, "topK": 7, "thinking_config": thinking}
    seen = {"inline_data": {"mime_type": "image/png", "data": "_-8", "display_name": "x"}}
    given = {"name": "f", "id": "c1", "response": {"result_text": "é"}, "parts": [seen]}
    said = [{"role": "user", "parts": {"text": "hi"}}]
    said += [{"role": "model", "parts": [{"function_call": {"id": "c1", "name": "f"}}]}]
    said += [{"role": "user", "parts": [{"function_response": given}, seen, {"text": "see"}]}]
    body = {"contents": said, "system_instruction": {"parts": {"text": "be brief"}}}
    body |= {"generation_config": config, "safety_settings": []}
    dialect = google.dialect("m", stream=False)
    request = read_request(dialect, json.dumps(body).encode(), ConversationMemory(), 0)
    sent = request.fields
    assert (sent["max_completion_tokens"], sent["top_k"]) == (9, 7)
    assert sent["reasoning_effort"] == "low"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,/+8="}}
    system, user, turn, result, last = sent["messages"]
    assert (system["content"], user["content"]) == ("be brief", "hi")
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    text = {"type": "text", "text": '{"result_text":"é"}'}
    assert (result["tool_call_id"], result["content"]) == ("c1", [text, image])
    assert last["content"] == [image, {"type": "text", "text": "see"}]
    assert request.ignored == [
        "contents.parts.functionResponse.parts.inlineData.displayName",
        "contents.parts.inlineData.displayName",
        "includeThoughts",
        "thinkingBudget",
    ]


@pytest.mark.parametrize(
    ("mode", "names", "choice"),
    [
        ("ANY", ["f", "g"], "required"),
        ("ANY", ["g", "f"], "required"),
        ("VALIDATED", ["f", "g"], "auto"),
        ("ANY", [], "required"),
        ("ANY", ["g"], {"type": "function", "function": {"name": "g"}}),
    ],
)
async def test_the_names_of_all_functions_are_no_limit(
    bench: Any, http: Any, mode: str, names: list[str], choice: Any
) -> None:
    calling = {"mode": mode, "allowed_function_names": names}
    body = {"contents": [USER], "tool_config": {"function_calling_config": calling}}
    body["tools"] = [{"functionDeclarations": [{"name": name}]} for name in "fg"]
    assert (await http.post(WHOLE, json=body)).status_code == 200
    assert bench.model.requests[0]["tool_choice"] == choice


@pytest.mark.parametrize("names", [["f", "h"], ["f", "f"]])
async def test_a_part_of_the_functions_is_refused(bench: Any, http: Any, names: list[str]) -> None:
    calling = {"mode": "ANY", "allowedFunctionNames": names}
    body = {"contents": [USER], "toolConfig": {"functionCallingConfig": calling}}
    body["tools"] = [{"functionDeclarations": [{"name": name} for name in "fgh"]}]
    answer = await http.post(WHOLE, json=body)
    assert answer.status_code == 400
    assert bench.model.requests == []


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
async def test_a_streamed_answer_comes_back_in_a_content_for_each_event(
    bench: Any, active: Any, http: Any, ids: bool, thinks: bool
) -> None:
    """As google-genai's function calling does; langchain-google-genai leaves out the ids, and both
    write signatures in the alphabet for URLs."""
    arguments = ['{"text":  "a"}', '{ "text": "a" }']
    functions = [{"name": "f", "arguments": text} for text in arguments]
    made = [{"id": f"c{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    given = {"role": "assistant", "content": "so", "tool_calls": made}
    given |= {"reasoning_content": "hm? é~~>"} if thinks else {}
    bench.model.answer = lambda body: given
    body = {"contents": [USER], "tools": [{"functionDeclarations": [{"name": "f"}]}]}
    chunks = events(await http.post(STREAM, json=body))
    assert all(chunk["candidates"][0]["content"]["parts"] for chunk in chunks)
    contents = [chunk["candidates"][0]["content"] for chunk in chunks]
    calls = contents[-1]["parts"]
    assert [part["functionCall"]["id"] for part in calls] == ["c0", "c1"]  # in one event
    for part in calls:
        if "thoughtSignature" in part:
            urlsafe = urlsafe_b64encode(b64decode(part["thoughtSignature"], validate=True))
            part["thoughtSignature"] = urlsafe.decode().rstrip("=")
        if not ids:
            del part["functionCall"]["id"]
    told = [{"functionResponse": {"name": "f", "response": {"n": n}}} for n in (1, 2)]
    said = [USER, *contents, {"role": "user", "parts": told}]
    bench.model.answer = lambda body: {"role": "assistant", "content": "done"}
    assert (await http.post(STREAM, json=body | {"contents": said})).status_code == 200
    _, turn, *results = bench.model.requests[1]["messages"]
    assert turn == given
    assert [result["tool_call_id"] for result in results] == ["c0", "c1"]
    assert [row.exact for row in await rows(bench, active)] == [True, True]


@pytest.mark.parametrize("path", [WHOLE, STREAM])
@pytest.mark.parametrize("said", ["", "4"])
async def test_the_last_part_ends_the_answer(bench: Any, http: Any, path: str, said: str) -> None:
    """An answer of nothing has a part, too; the thought before words is sealed in the last one."""
    thought = {"reasoning_content": "2+2"} if said else {}
    bench.model.answer = lambda body: {
        "role": "assistant", "content": said, "tool_calls": [], **thought
    }  # fmt: skip
    answer = await http.post(path, json={"contents": [USER]})
    chunks = [answer.json()] if path == WHOLE else events(answer)
    candidate = chunks[-1]["candidates"][0]
    last = candidate["content"]["parts"][-1]
    assert (last["text"], candidate["finishReason"]) == (said, "STOP")
    contents = [USER, {"role": "model", "parts": [last]}, USER]
    await http.post(path, json={"contents": contents})
    assert (
        bench.model.requests[1]["messages"][1] == {"role": "assistant", "content": said} | thought
    )


async def test_tokens_are_counted(bench: Any, active: Any, http: Any) -> None:
    tools = [{"functionDeclarations": DECLARED}]
    whole = {"model": "models/m", "contents": [USER], "tools": tools}
    for body in ({"contents": [USER], "tools": tools}, {"generateContentRequest": whole}):
        answer = await http.post("/models/m:countTokens", json=body)
        sent = bench.model.requests[-1]
        assert answer.json() == {"totalTokens": len(json.dumps(sent["messages"]))}
        assert sent.keys() == {"model", "messages", "tools"}
    assert await rows(bench, active) == []


async def test_errors_are_googles(bench: Any, active: Any, http: Any) -> None:
    unknown = await http.post("/models/m:embedContent", json={})
    assert (unknown.status_code, unknown.json()["error"]["status"]) == (404, "NOT_FOUND")
    no_events = await http.post("/models/m:streamGenerateContent", json={"contents": [USER]})
    assert no_events.status_code == 400
    assert "?alt=sse" in no_events.json()["error"]["message"]
    bench.gateway.unregister(active)
    ended = await http.post(STREAM, json={"contents": [USER]})
    assert (ended.status_code, ended.json()["error"]["status"]) == (403, "PERMISSION_DENIED")


async def test_a_stream_that_breaks_ends_with_an_error(bench: Any, active: Any, http: Any) -> None:
    async def broken(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for text in texts:
            event = {"model": "m", "choices": [{"index": 0, "delta": {"content": text}}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        return response

    texts = ["half"]  # sent with the next part, so that the call is tried again
    bench.model.then(broken)
    again = events(await http.post(STREAM, json={"contents": [USER]}))
    assert again[0]["candidates"][0]["content"]["parts"] == [{"text": "e"}]
    texts.append(" of it")
    bench.model.then(broken)
    said, cut = b"", False
    try:
        async with http.stream("POST", STREAM, json={"contents": [USER]}) as answer:
            async for part in answer.aiter_bytes():
                said += part
    except httpx.RemoteProtocolError:
        cut = True
    assert cut
    half, failed = [json.loads(part[6:]) for part in said.decode().strip().split("\n\n")]
    assert half["candidates"][0]["content"]["parts"] == [{"text": "half"}]
    assert failed["error"]["code"] == 502
    assert "half a stream" in failed["error"]["message"]
