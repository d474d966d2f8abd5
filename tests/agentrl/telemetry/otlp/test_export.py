"""`agentrl export otlp` against a receiver that reads requests with OpenTelemetry's own classes."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

import agentrl
from agentrl import Reward, Scope
from agentrl.cli.main import cli
from agentrl.core.errors import AgentRLError, NotFound, Unavailable
from agentrl.core.types import Span, Trace, Transition
from agentrl.runners.tracing import core as tracing
from agentrl.runners.tracing import langchain_steps as steps
from agentrl.telemetry import otlp
from tests import factories


class Receiver:
    """Takes traces; `script` are the statuses of the next answers, then all is well."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[Any] = []
        self.script: deque[int] = deque()
        self.rejected = 0
        self.said = b""  # instead of an answer
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/traces", self.take)
        self.server = TestServer(app, host="127.0.0.1")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    async def take(self, request: web.Request) -> web.Response:
        if self.script:
            return web.Response(status=self.script.popleft(), headers={"retry-after": "0"})
        assert request.content_type == "application/x-protobuf"
        body = await request.read()  # aiohttp has undone the compression
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        self.headers.append(request.headers)
        answer = ExportTraceServiceResponse()
        if self.rejected:
            answer.partial_success.rejected_spans = self.rejected
            answer.partial_success.error_message = "too old"
        body = self.said or answer.SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    monkeypatch.setattr(otlp, "FIRST_PAUSE", 0.001)
    receiver = Receiver()
    await receiver.server.start_server()
    yield receiver
    await receiver.server.close()


@pytest.fixture
async def agent(bench: Any) -> AsyncIterator[Any]:
    import httpx2
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def repeat(text: str) -> str:
        """Repeat a text."""
        agentrl.reward(0.5, "called")
        return f"tool {text}"

    with httpx2.Client() as client:
        async with httpx2.AsyncClient() as other:
            model = ChatOpenAI(model="gpt", http_client=client, http_async_client=other)
            yield create_agent(model, [repeat], name="clerk")


def read(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(item) for item in found.values] if kind == "array_value" else found

    return {pair.key: plain(pair.value) for pair in span.attributes}


def tree(spans: list[Any]) -> list[tuple[str, str, str]]:
    """Name, OpenInference kind and parent's name, in the order sent."""
    names = {span.span_id: span.name for span in spans}
    return [
        (
            span.name,
            read(span).get("openinference.span.kind", ""),
            names.get(span.parent_span_id, ""),
        )
        for span in spans
    ]


async def test_an_attempt_arrives_as_a_trace(bench: Any, agent: Any, receiver: Receiver) -> None:
    (rollout,) = await bench.run(agent, {"input": "hello"})
    receiver.script.extend([503, 429])
    sent = await otlp.send(bench.store.url, "test", [], receiver.url + "/", {"x-key": "k"})
    assert sent == (1, 8)
    assert len(receiver.requests) == 1
    assert receiver.headers[0]["x-key"] == "k"
    assert tree(receiver.spans) == [
        ("invoke_agent test", "AGENT", ""),
        ("clerk", "AGENT", "invoke_agent test"),
        ("model", "CHAIN", "clerk"),
        ("chat policy", "LLM", "model"),
        ("tools", "CHAIN", "clerk"),
        ("repeat", "TOOL", "tools"),
        ("model", "CHAIN", "clerk"),
        ("chat policy", "LLM", "model"),
    ]
    root, call = receiver.spans[0], receiver.spans[3]
    assert {span.trace_id.hex() for span in receiver.spans} == {rollout.attempt}
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in receiver.spans)
    said = read(root)
    assert (said["agentrl.rollout"], said["agentrl.reward.outcome"]) == (rollout.id, 1.0)
    assert (said["input.value"], said["output.value"]) == ("hello", "echo tool hello")
    said = read(call)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "policy"
    assert said["gen_ai.request.temperature"] == 0.7
    assert "gen_ai.request.override_agent" not in said  # a setting of agentrl, not of the request
    assert "override_agent" not in json.loads(str(said["llm.invocation_parameters"]))
    assert said["gen_ai.response.finish_reasons"] == ["tool_calls"]
    (transition, _) = (await bench.store.trace(rollout.id)).transitions
    assert said["gen_ai.usage.input_tokens"] == len(transition.prompt)
    assert said["gen_ai.usage.output_tokens"] == len(transition.completion)
    assert said["llm.input_messages.0.message.content"] == "hello"
    name = "llm.output_messages.0.message.tool_calls.0.tool_call.function.name"
    assert said[name] == "repeat"
    assert said["gen_ai.input.messages"] == (
        '[{"role":"user","parts":[{"type":"text","content":"hello"}]}]'
    )
    assert '"type":"tool_call"' in said["gen_ai.output.messages"]
    assert (said["agentrl.role"], said["agentrl.policy.version"]) == ("agent", 7)
    assert said["agentrl.reward.called"] == 0.5
    resource = read(receiver.requests[0].resource_spans[0].resource)
    assert resource["openinference.project.name"] == "test"


async def test_sending_again_changes_nothing(bench: Any, agent: Any, receiver: Receiver) -> None:
    await bench.run(agent, *({"input": str(i)} for i in range(3)))
    await otlp.send(bench.store.url, "test", [], receiver.url, {})
    first = receiver.requests.pop()
    command = ["export", "otlp", "--store", bench.store.url, "--run", "test", "--to", receiver.url]
    result = await asyncio.to_thread(CliRunner().invoke, cli, command)
    assert result.output == "sent 3 attempts as 24 spans\n"
    assert receiver.requests == [first]


async def test_large_runs_go_in_batches(
    bench: Any, agent: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "SPANS_PER_REQUEST", 20)
    rollouts = await bench.run(agent, *({"input": str(i)} for i in range(5)))
    assert await otlp.send(bench.store.url, "test", [], receiver.url, {}) == (5, 40)
    assert len(receiver.requests) == 3
    assert len({span.span_id for span in receiver.spans}) == 40
    receiver.requests.clear()
    one = [rollouts[2].id]
    assert await otlp.send(bench.store.url, "test", one, receiver.url, {}) == (1, 8)


async def test_openinference_spans_are_not_doubled(
    bench: Any, agent: Any, receiver: Receiver
) -> None:
    instrumentation = pytest.importorskip("openinference.instrumentation.langchain")
    tracing.install()
    steps.instrument_frameworks()
    try:
        await bench.run(agent, {"input": "x"})
    finally:
        instrumentation.LangChainInstrumentor().uninstrument()
        steps.set_recorder(None)
    await otlp.send(bench.store.url, "test", [], receiver.url, {})
    calls = [row for row in tree(receiver.spans) if row[1] == "LLM"]
    assert calls == [("ChatOpenAI", "LLM", "model")] * 2
    merged = next(span for span in receiver.spans if span.name == "ChatOpenAI")
    assert {"agentrl.role", "gen_ai.request.model", "llm.model_name"} <= read(merged).keys()
    assert not [span for span in receiver.spans if span.name == "POST"]


async def test_what_cannot_be_sent_is_said(bench: Any, receiver: Receiver) -> None:
    await bench.run(lambda text: text, {"input": "x"})
    url = bench.store.url
    with pytest.raises(NotFound, match="no run 'other'"):
        await otlp.send(url, "other", [], receiver.url, {})
    with pytest.raises(NotFound, match="no rollout 'other'"):
        await otlp.send(url, "test", ["other"], receiver.url, {})
    for status, reason in ((401, "--header"), (404, "status 404")):
        receiver.script.append(status)
        with pytest.raises(AgentRLError, match=reason):
            await otlp.send(url, "test", [], receiver.url, {})
    receiver.script.extend([503] * otlp.MAX_TRIES)
    with pytest.raises(Unavailable, match="status 503"):
        await otlp.send(url, "test", [], receiver.url, {})
    with pytest.raises(Unavailable, match="ConnectError"):
        await otlp.send(url, "test", [], "http://127.0.0.1:1", {})
    receiver.rejected = 2
    with pytest.raises(AgentRLError, match="rejected 2 spans: too old"):
        await otlp.send(url, "test", [], receiver.url, {})
    receiver.said = b"\xff\xff"
    with pytest.raises(AgentRLError, match="did not answer with OTLP"):
        await otlp.send(url, "test", [], receiver.url, {})


ATTEMPT = "ab" * 16


def call(index: int, span: str | None, start: float = 1.0, seconds: float = 1.0) -> Transition:
    about = {"attempt": ATTEMPT, "index": index, "span": span, "started": start}
    return factories.call(f"{ATTEMPT}-{index}", seconds=seconds, **about)


def span(id: str, parent: str | None, kind: str, *times: float, **attributes: Any) -> Span:
    start, end = (int(t * 1e9) for t in times or (1.0, 2.0))
    return Span(
        id=id * 16,
        attempt=ATTEMPT,
        parent=parent and parent * 16,
        name=id,
        kind=kind,
        start=start,
        end=end,
        attributes=attributes,
    )


def exported(transitions: list[Transition], spans: list[Span]) -> dict[str, tuple[str, str | None]]:
    rollout = factories.rollout(
        task={"input": 1},
        attempt=ATTEMPT,
        rewards=[Reward(value=1, scope=Scope.ROLE, target="critic")],
    )
    trace = Trace(rollout=rollout, attempt=ATTEMPT, transitions=transitions, spans=spans)
    found = otlp.spans_of(trace)
    assert found[0].parent is None
    assert found[0].attributes["agentrl.reward.critic.outcome"] == 1
    assert len({row.id for row in found}) == len(found)
    assert {row.parent for row in found[1:]} <= {row.id for row in found}
    names = {row.id: row.name for row in found}
    return {row.name + row.id[0]: (row.kind, row.parent and names[row.parent]) for row in found[1:]}


def test_calls_find_their_place() -> None:
    http = {"http.method": "POST"}
    # A request inside an llm span of the agent's own instrumentation, as in another process.
    around = [span("a", "f", "llm"), span("b", "a", "internal", **http)]
    assert exported([call(0, "b" * 16)], around) == {"aa": ("llm", "invoke_agent run")}
    # Two llm spans in one step: each call belongs to the one that covers it.
    beside = [
        span("c", None, "chain", 0.0, 9.0),
        span("d", "c", "llm", 0.5, 2.5),
        span("e", "c", "llm", 3.0, 5.0),
        span("1", "c", "internal", 1.0, 2.0, **http),
        span("2", "c", "internal", 3.5, 4.5, **http),
    ]
    calls = [call(0, "1" * 16), call(1, "2" * 16, 3.5)]
    assert exported(calls, beside) == {
        "cc": ("chain", "invoke_agent run"),
        "dd": ("llm", "c"),
        "ee": ("llm", "c"),
    }
    # A span of the user's that is no request keeps its place above the call.
    found = exported([call(0, "c" * 16)], [span("c", None, "internal")])
    assert sorted(found.values()) == [("internal", "invoke_agent run"), ("llm", "c")]
    # Two samples of one request, and a call without any span.
    found = exported([call(0, "b" * 16), call(1, "b" * 16), call(2, None)], around[1:])
    assert list(found.values()) == [("llm", "invoke_agent run")] * 3


def test_spans_that_are_each_others_parents_hang_below_the_root() -> None:
    ring = [span("1", "3", "internal"), span("2", "1", "internal"), span("3", "2", "internal")]
    assert exported([call(0, "2" * 16)], ring) == {
        "11": ("internal", "invoke_agent run"),
        "22": ("internal", "1"),
        "33": ("internal", "2"),
        f"chat {call(0, None).policy}{otlp._id(call(0, None).id)[0]}": ("llm", "2"),
    }


def test_a_call_has_the_forms_of_the_semantic_conventions() -> None:
    image, audio = "data:image/png;base64,AAE=", {"data": "AAE=", "format": "wav"}
    content = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}},
        {"type": "input_audio", "input_audio": audio},
        {"type": "file", "file": {"file_id": "f"}},
    ]
    parameters = {"type": "object"}
    function = {"name": "look", "description": "Look.", "parameters": parameters, "strict": True}
    made = replace(
        call(0, None),
        finish="tool_calls",
        messages=[{"role": "user", "content": content}],
        answer={"role": "assistant", "reasoning_content": "hm", "content": "well"},
        tools=[{"type": "function", "function": function}, {"type": "web_search"}],
    )
    said = otlp.call_attributes(made)
    ((user,), (answer,)) = (
        json.loads(str(said[f"gen_ai.{side}.messages"])) for side in ("input", "output")
    )
    assert user["parts"] == [
        {"type": "text", "content": "look"},
        {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "AAE="},
        {"type": "uri", "modality": "image", "uri": "https://x.org/a.png"},
        {"type": "blob", "modality": "audio", "mime_type": "audio/wav", "content": "AAE="},
        content[4],
    ]
    reasoning, text = answer["parts"]
    assert reasoning == {"type": "reasoning", "content": "hm"}
    assert (text["content"], answer["finish_reason"]) == ("well", "tool_call")
    assert said["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert json.loads(str(said["gen_ai.tool.definitions"])) == [
        {"type": "function"}
        | {key: function[key] for key in ("name", "description", "parameters")},
        {"type": "web_search", "name": "web_search"},
    ]


def test_recorded_spans_get_the_current_names_and_their_operation() -> None:
    spans = [
        span("a", None, "agent", **{"gen_ai.workflow.name": "crew"}),
        span("b", "a", "tool"),
        span("c", "a", "chain", **{"gen_ai.system": "openai"}),
    ]
    trace = Trace(rollout=factories.rollout(), attempt=ATTEMPT, transitions=[], spans=spans)
    agent, tool, chain = (row.attributes for row in otlp.spans_of(trace)[1:])
    assert (agent["gen_ai.operation.name"], agent["gen_ai.agent.name"]) == ("invoke_agent", "crew")
    assert agent["gen_ai.workflow.name"] == "crew"
    assert (tool["gen_ai.operation.name"], tool["gen_ai.tool.name"]) == ("execute_tool", "b")
    assert chain["gen_ai.provider.name"] == "openai"
    assert "gen_ai.operation.name" not in chain
