"""What coding harnesses send beyond the API's basics: nothing of theirs is lost or changed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentrl.algorithms.data.merge import merge
from agentrl.transcript import render_trace
from tests.runners.conftest import ids

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
SPAWN = {"type": "function", "name": "spawn", "parameters": PARAMETERS}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
EXEC = {"type": "custom", "name": "exec", "description": "Runs code.", "format": GRAMMAR}
CODEX: dict[str, Any] = {
    "model": "policy",
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto", "context": "all_turns"},
    "client_metadata": {"turn_id": "1"},
    "tool_choice": "auto",
}


@pytest.fixture
async def http(bench: Any, active: Any) -> Any:
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as client:
        yield client


async def trace(bench: Any, active: Any) -> Any:
    return await bench.store.trace(active.attempt.rollout.id)


def says(name: str, arguments: str, id: str = "call-0") -> Any:
    function = {"name": name, "arguments": arguments}
    call = {"id": id, "type": "function", "function": function}
    return lambda body: {"role": "assistant", "content": None, "tool_calls": [call]}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# -- Responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["tools", "input"])
async def test_a_namespace_is_offered_flat_and_its_calls_are_split(
    bench: Any, http: Any, where: str
) -> None:
    space = [{"type": "namespace", "name": "agents", "tools": [SPAWN]}]
    said: list[Any] = [{"role": "user", "content": "hello"}]
    body = CODEX | {"tools": space}
    if where == "input":  # as an item, before what is said
        body = CODEX.copy()
        said.insert(0, {"type": "additional_tools", "role": "developer", "tools": space})
    bench.model.answer = says("agents__spawn", '{"text":  "x"}')
    *_, last = events(await http.post("/responses", json=body | {"input": said}))
    (item,) = last["response"]["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "spawn")
    (offered,) = bench.model.requests[0]["tools"]
    assert offered == {
        "type": "function",
        "function": {"name": "agents__spawn", "parameters": PARAMETERS},
    }
    assert len(bench.model.requests[0]["messages"]) == 1
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
    bench.model.answer = lambda body: {"role": "assistant", "content": "done"}
    await http.post("/responses", json=body | {"input": [*said, item, result]})
    (call,) = bench.model.requests[1]["messages"][-2]["tool_calls"]
    assert call["function"] == {"name": "agents__spawn", "arguments": '{"text":  "x"}'}


async def test_a_function_with_two_underscores_is_no_namespace(bench: Any, http: Any) -> None:
    bench.model.answer = says("my__f", "{}")
    tools = [SPAWN | {"name": "my__f"}]
    *_, last = events(await http.post("/responses", json=CODEX | {"input": "x", "tools": tools}))
    (item,) = last["response"]["output"]
    assert item["name"] == "my__f"
    assert "namespace" not in item


async def test_a_custom_tool_is_called_with_its_text(bench: Any, http: Any) -> None:
    written = '{ "input": "a\\n\\u00e9" }'
    bench.model.answer = says("exec", written)
    body = CODEX | {"input": [{"role": "user", "content": "hello"}], "tools": [EXEC]}
    found = events(await http.post("/responses", json=body))
    (item,) = found[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "exec", "a\né")
    done = next(e for e in found if e["type"] == "response.custom_tool_call_input.done")
    assert done["input"] == "a\né"
    function = bench.model.requests[0]["tools"][0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert "Runs code." in function["description"]
    assert GRAMMAR["definition"] in function["description"]
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    await http.post("/responses", json=body | {"input": [*body["input"], item, result]})
    *_, turn, told = bench.model.requests[1]["messages"]
    assert turn["tool_calls"][0]["function"]["arguments"] == written
    assert told == {"role": "tool", "tool_call_id": item["call_id"], "content": "ok"}


async def test_what_is_left_out_is_recorded_and_shown(bench: Any, active: Any, http: Any) -> None:
    tools = [{"type": "web_search"}, SPAWN, {"type": "image_generation"}]
    await http.post("/responses", json=CODEX | {"input": "hello", "tools": tools})
    (offered,) = bench.model.requests[0]["tools"]
    assert offered["function"]["name"] == "spawn"
    found = await trace(bench, active)
    ignored = ["client_metadata", "reasoning.context", "reasoning.summary"]
    ignored += ["tools: web_search", "tools: image_generation"]
    assert found.transitions[0].ignored == ignored
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as printed:
        console.print(render_trace(found))
    assert "ignored: client_metadata, reasoning.context" in printed.get()
    # With no tool left to offer, there is none to choose.
    await http.post("/responses", json=CODEX | {"input": "hello", "tools": tools[:1]})
    assert not bench.model.requests[1].keys() & {"tools", "tool_choice", "client_metadata"}


async def test_the_effort_may_change_in_the_middle(bench: Any, http: Any) -> None:
    said = [{"role": "user", "content": "hello"}]
    update = {"type": "configuration_update", "reasoning": {"effort": "high"}}
    body = CODEX | {"input": [*said, update], "reasoning": {"effort": "low"}}
    assert (await http.post("/responses", json=body)).status_code == 200
    assert bench.model.requests[0]["reasoning_effort"] == "high"
    assert bench.model.requests[0]["messages"] == said


async def test_sealed_reasoning_comes_back(bench: Any, http: Any) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2+2 é"}
    bench.model.answer = lambda body: answer
    said = [{"role": "user", "content": "hello"}]
    *_, last = events(await http.post("/responses", json=CODEX | {"input": said}))
    thought, message = last["response"]["output"]
    del thought["content"]  # an agent gives back what it cannot read
    more = [*said, thought, message, {"role": "user", "content": "more"}]
    assert (await http.post("/responses", json=CODEX | {"input": more})).status_code == 200
    assert bench.model.requests[1]["messages"][1] == answer
    thought["encrypted_content"] = "gAAAA"
    refused = await http.post("/responses", json=CODEX | {"input": more})
    assert refused.status_code == 400


# -- Messages --------------------------------------------------------------------------------------


async def test_claude_may_ask_for_less_context_and_hosted_tools(
    bench: Any, active: Any, http: Any
) -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    tools += [{"name": "Bash", "input_schema": PARAMETERS}]
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    body |= {"context_management": edits, "tools": tools, "tool_choice": {"type": "auto"}}
    assert (await http.post("/messages", json=body)).status_code == 200
    (offered,) = bench.model.requests[0]["tools"]
    assert offered["function"]["name"] == "Bash"
    (row,) = (await trace(bench, active)).transitions
    assert row.ignored == ["context_management", "tools: web_search_20250305"]
    body["tools"] = tools[:1]
    assert (await http.post("/messages", json=body)).status_code == 200
    assert not bench.model.requests[1].keys() & {"tools", "tool_choice"}


async def test_a_system_message_may_set_the_effort_and_pass(
    bench: Any, active: Any, http: Any
) -> None:
    """As Claude Code's SDK sends the effort; `clear_at` and an empty message are in its types."""
    once = {"role": "system", "content": "Hurry.", "clear_at": "next_user_message"}
    first = {"role": "user", "content": "hello"}
    said = [
        first,
        {"role": "system", "content": "Linux.", "output_config": {"effort": "low"}},
        once,
    ]
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, "output_config": {"effort": "high"}}
    assert (await http.post("/messages", json=body | {"messages": said})).status_code == 200
    said += [{"role": "assistant", "content": "echo"}, {"role": "user", "content": "on"}]
    said += [{"role": "system", "output_config": {"effort": "max"}}]
    assert (await http.post("/messages", json=body | {"messages": said})).status_code == 200
    one, two = bench.model.requests
    assert (one["reasoning_effort"], two["reasoning_effort"]) == ("low", "max")
    assert [turn["content"] for turn in one["messages"]] == ["hello", "Linux.", "Hurry."]
    assert [turn["content"] for turn in two["messages"]] == ["hello", "Linux.", "echo", "on"]
    assert [row.ignored for row in (await trace(bench, active)).transitions] == [[], []]


async def test_a_format_of_the_answer_has_an_older_name(bench: Any, http: Any) -> None:
    """As litellm 1.108 sends the `response_format` of claude-sonnet-4-5."""
    schema = PARAMETERS | {"required": ["text"], "additionalProperties": False}
    wanted = {"type": "json_schema", "schema": schema}
    system = [{"type": "text", "text": "Be brief."}]
    turns = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    body = {"model": "claude-sonnet-4-5", "system": system, "messages": turns}
    body |= {"max_tokens": 64000, "output_format": wanted}
    headers = {"anthropic-beta": "structured-outputs-2025-11-13"}
    assert (await http.post("/messages", json=body, headers=headers)).status_code == 200
    (sent,) = bench.model.requests
    form = {"name": "answer", "schema": schema, "strict": True}
    assert sent["response_format"] == {"type": "json_schema", "json_schema": form}
    assert "output_format" not in sent
    both = await http.post("/messages", json=body | {"output_config": {"format": wanted}})
    assert both.status_code == 400
    assert both.json()["error"]["message"].startswith("output_format: ")


# -- chat completions ------------------------------------------------------------------------------

WRITTEN = [
    '{"n":  1.0, "s": "\\u00e9"}',
    '{"b": 2, "a": [1,2]}',
    "",
    '{"s":"\\ud83d","t":1E400,"u":1,"u":"\\/"}',
    '{"big": 12345678901234567890}',
]
GIVEN = ['{"n":1,"s":"é"}', '{"a":[1,2],"b":2}', "{}"]
GIVEN += ['{"s": "\\ud83d", "t": Infinity, "u": "/"}', '{"big":12345678901234567000}']


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_go_back_byte_for_byte(
    bench: Any, active: Any, http: Any, stream: bool
) -> None:
    """As harnesses in JavaScript write them: other white space, escapes, numbers, order."""
    said: list[Any] = [{"role": "user", "content": "hello"}]
    body: dict[str, Any] = {"model": "m", "messages": said, "stream": stream}
    for number, (written, given) in enumerate(zip(WRITTEN, GIVEN, strict=True)):
        bench.model.answer = says("f", written, id=f"call-{number}")
        assert (await http.post("/chat/completions", json=body)).status_code == 200
        said.append({"role": "assistant", "content": None})
        call = {"id": f"call-{number}", "type": "function"}
        said[-1]["tool_calls"] = [call | {"function": {"name": "f", "arguments": given}}]
        said.append({"role": "tool", "tool_call_id": f"call-{number}", "content": "ok"})
    assert (await http.post("/chat/completions", json=body)).status_code == 200
    turns = [m for m in bench.model.requests[-1]["messages"] if m["role"] == "assistant"]
    sent = [turn["tool_calls"][0]["function"]["arguments"] for turn in turns]
    # A number that the agent changed is what it acted on.
    assert sent == [*WRITTEN[:-1], GIVEN[-1]]


async def test_a_conversation_of_tool_calls_is_one_row(bench: Any, active: Any, http: Any) -> None:
    """The fake server's prompts go on from its answers only if the arguments are the same."""

    def rendered(messages: list[Any]) -> list[int]:
        text = "".join(
            f"<{m['role']}>{m['content'] or json.dumps(m['tool_calls'])}" for m in messages
        )
        return ids(f"{text}<assistant>")

    bench.model.prompt = lambda body: {"prompt_token_ids": rendered(body["messages"])}
    said: list[Any] = [{"role": "user", "content": "hello"}]
    for number, (written, given) in enumerate(zip(WRITTEN[:-1], GIVEN[:-1], strict=True)):
        bench.model.answer = answer = says("f", written, id=f"call-{number}")
        await http.post("/chat/completions", json={"model": "m", "messages": said})
        turn = json.loads(json.dumps(answer({})))
        turn["tool_calls"][0]["function"]["arguments"] = given
        said += [turn, {"role": "tool", "tool_call_id": f"call-{number}", "content": "ok"}]
    calls = (await trace(bench, active)).transitions
    assert len(calls) == len(WRITTEN) - 1
    assert len(merge(calls)) == 1


# -- routes ----------------------------------------------------------------------------------------


async def test_what_clients_ask_beside_their_calls(bench: Any, active: Any, http: Any) -> None:
    root = bench.gateway.base_url.removesuffix("/v1")
    for path in ("/", f"/a/{active.id}"):
        assert (await http.head(f"{root}{path}")).status_code == 200
    assert (await http.get("/models/tiny")).json()["id"] == "tiny"
    claude = {"anthropic-version": "2023-06-01"}
    assert (await http.get("/models/tiny", headers=claude)).json()["display_name"] == "tiny"
    theirs = {"x-goog-api-key": active.key}
    for prefix in ("/v1", "/v1beta"):
        listed = await http.get(f"{root}{prefix}/models", headers=theirs)
        assert [one["name"] for one in listed.json()["models"]] == ["models/policy", "models/tiny"]
        one = await http.get(f"{root}{prefix}/models/tiny", headers=theirs)
        assert one.json() == listed.json()["models"][1]
    lost = await http.get(f"{root}/v1beta/models/other", headers=theirs)
    assert lost.json()["error"]["status"] == "NOT_FOUND"
    unknown = await http.get("/models/other")
    assert unknown.status_code == 404
    assert "'tiny'" in unknown.json()["error"]["message"]
    refused = await http.get("/responses", headers={"upgrade": "websocket"})
    assert refused.status_code == 426
    assert "POST" in refused.json()["error"]["message"]


async def test_logs_and_metrics_are_dropped(bench: Any, active: Any) -> None:
    """The key comes as a client of OpenTelemetry sends it, which does not decode its setting."""
    headers = {"authorization": f"Bearer%20{active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        for route in ("logs", "metrics"):
            json_ = await http.post(f"/{route}", json={"resourceLogs": []})
            assert (json_.status_code, json_.content) == (200, b"{}")
            kind = {"content-type": "application/x-protobuf"}
            binary = await http.post(f"/{route}", content=b"\x0a\x00", headers=kind)
            assert (binary.status_code, binary.content) == (200, b"")
            assert binary.headers["content-type"] == "application/x-protobuf"
        wrong = await http.post("/logs", json={}, headers={"authorization": "Bearer%20x"})
        assert wrong.status_code == 401
