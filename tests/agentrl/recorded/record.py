"""Records the fixtures of the readers with the real SDKs, against servers of this process:
`python -m tests.agentrl.recorded.record FORMAT FOLDER`, in an environment with the SDK.

The agent is a LangGraph of two nodes with a tool, or the same with an SDK of its own; a scripted
model answers. Nothing leaves the machine.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PRICES = {"rug": "35", "vase": "12"}
BODIES: list[tuple[str, str, bytes]] = []  # path, content type, body
TOOL = {
    "name": "look_up",
    "description": "The price of a product.",
    "parameters": {
        "type": "object",
        "properties": {"product": {"type": "string"}},
        "required": ["product"],
    },
}


def answer(messages: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """The scripted model: the planner names the product, the seller looks it up and answers."""
    text = " ".join(str(message.get("content")) for message in messages)
    product = next((name for name in PRICES if name in text), "rug")
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": f"It costs {messages[-1]['content']}."}
    if tools:
        function = {"name": "look_up", "arguments": json.dumps({"product": product})}
        call = {"id": "call_" + product, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "assistant", "content": product}


class Stub(BaseHTTPRequestHandler):
    """The model, and whatever receives traces."""

    def do_GET(self) -> None:
        limits = {
            "use_multipart_endpoint": False, "size_limit": 100, "size_limit_bytes": 20_000_000,
            "scale_up_nthreads_limit": 1, "scale_up_qsize_trigger": 1000,
            "scale_down_nempty_trigger": 4,
        }  # fmt: skip
        self._send({"instance_flags": {}, "batch_ingest_config": limits})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        BODIES.append((self.path, self.headers.get("content-type", ""), body))
        if self.path.endswith("/chat/completions"):
            given = json.loads(body)
            message = answer(given["messages"], given.get("tools"))
            choice = {
                "index": 0, "message": message,
                "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            }  # fmt: skip
            usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
            self._send({
                "id": f"chatcmpl-{len(BODIES)}", "object": "chat.completion",
                "created": int(time.time()),
                "model": "gpt-scripted-2026-01-01", "choices": [choice], "usage": usage,
            })  # fmt: skip
        else:
            self._send({})

    do_PATCH = do_PUT = do_POST  # noqa: N815 - named by the methods of HTTP

    def _send(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def graph() -> Any:
    """planner -> seller, with a tool."""
    from typing import TypedDict

    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph

    @tool
    def look_up(product: str) -> str:
        """The price of a product."""
        return PRICES[product]

    model = ChatOpenAI(model="gpt-scripted", temperature=0.5)
    State = TypedDict("State", {"question": str, "product": str, "answer": str})  # noqa: UP013

    def planner(state: Any) -> Any:
        messages = [SystemMessage("Name the product."), HumanMessage(state["question"])]
        return {"product": model.invoke(messages).content}

    def seller(state: Any) -> Any:
        messages: list[Any] = [HumanMessage("What costs the " + state["product"] + "?")]
        said: Any = model.bind_tools([look_up]).invoke(messages)
        call = said.tool_calls[0]
        result = look_up.invoke(call)
        result = (
            result
            if isinstance(result, ToolMessage)
            else ToolMessage(result, tool_call_id=call["id"])
        )
        return {"answer": model.bind_tools([look_up]).invoke([*messages, said, result]).content}

    made = StateGraph(State)
    made.add_node("planner", planner)
    made.add_node("seller", seller)
    made.add_edge(START, "planner")
    made.add_edge("planner", "seller")
    made.add_edge("seller", END)
    return made.compile(name="shop")


def play(config: Any = None) -> None:
    agent = graph()
    for product in PRICES:
        agent.invoke({"question": f"What does a {product} cost?"}, config)


def raw_openai() -> None:
    """The seller, with OpenAI's SDK alone."""
    from openai import OpenAI

    client, tools = OpenAI(), [{"type": "function", "function": TOOL}]
    for product in PRICES:
        messages: list[Any] = [
            {"role": "system", "content": "You sell."},
            {"role": "user", "content": f"What does a {product} cost?"},
        ]
        said = client.chat.completions.create(
            model="gpt-scripted", messages=messages, tools=tools, temperature=0.5
        )
        message = said.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages.append(
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": PRICES[product]}
        )
        client.chat.completions.create(
            model="gpt-scripted", messages=messages, tools=tools, temperature=0.5
        )


def otlp_lines() -> bytes:
    """The received OTLP requests as the collector's file exporter writes them: a line each."""
    import base64

    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    lines = []
    for path, kind, body in BODIES:
        if path.endswith("/traces") and "protobuf" in kind:
            data = json_format.MessageToDict(
                ExportTraceServiceRequest.FromString(body), use_integers_for_enums=True
            )
            for resource in data.get("resourceSpans", ()):
                for scope in resource.get("scopeSpans", ()):
                    for span in scope.get("spans", ()):
                        for row in (span, *span.get("links", ())):
                            for key in {"traceId", "spanId", "parentSpanId"} & row.keys():
                                row[key] = base64.b64decode(row[key]).hex()
            lines.append(json.dumps(data))
    return ("\n".join(lines) + "\n").encode()


def with_otlp(url: str) -> Any:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url + "/v1/traces")))
    trace.set_tracer_provider(provider)
    return provider


def openinference(url: str) -> bytes:
    from openinference.instrumentation.langchain import LangChainInstrumentor

    provider = with_otlp(url)
    LangChainInstrumentor().instrument(tracer_provider=provider)
    play()
    provider.force_flush()
    return otlp_lines()


def genai(url: str) -> bytes:
    os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "SPAN_ONLY"
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    provider = with_otlp(url)
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    _traced(raw_openai)
    provider.force_flush()
    return otlp_lines()


def openllmetry(url: str) -> bytes:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    provider = with_otlp(url)
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    _traced(raw_openai)
    provider.force_flush()
    return otlp_lines()


def _traced(work: Any) -> None:
    from opentelemetry import trace

    with trace.get_tracer("shop").start_as_current_span("invoke_agent seller") as span:
        span.set_attribute("gen_ai.operation.name", "invoke_agent")
        span.set_attribute("gen_ai.agent.name", "seller")
        work()


def langsmith(url: str) -> bytes:
    """The runs that LangSmith's client sends, as its `list_runs` gives them back: `Run.json()`."""
    os.environ |= {"LANGSMITH_TRACING": "true", "LANGSMITH_ENDPOINT": url, "LANGSMITH_API_KEY": "k"}
    from langchain_core.tracers.langchain import wait_for_all_tracers
    from langsmith.schemas import Feedback, Run

    play()
    wait_for_all_tracers()
    from langsmith import Client

    Client().flush()
    time.sleep(2)
    runs: dict[str, dict[str, Any]] = {}
    for path, _, body in BODIES:
        if path.endswith("/runs/batch"):
            batch = json.loads(body)
            for row in [*batch.get("post", ()), *batch.get("patch", ())]:
                runs.setdefault(row["id"], {}).update(
                    {k: v for k, v in row.items() if v is not None}
                )
    lines = []
    for row in runs.values():
        model = Run(**{"app_path": "", "session_id": None, **row})
        lines.append(model.model_dump_json() if hasattr(model, "model_dump_json") else model.json())
    roots = [row for row in runs.values() if not row.get("parent_run_id")]
    for row, score in zip(roots, (1.0, 0.0), strict=True):
        made = Feedback(
            id="00000000-0000-0000-0000-00000000000" + str(int(score)),
            created_at=datetime.now(UTC),
            modified_at=datetime.now(UTC), run_id=row["id"], trace_id=row["id"], key="correct",
            score=score, value=None, comment="checked", correction=None,
        )  # fmt: skip
        lines.append(made.model_dump_json() if hasattr(made, "model_dump_json") else made.json())
    return ("\n".join(lines) + "\n").encode()


def langfuse(url: str) -> bytes:
    """What Langfuse's client sends (OTLP), and its scores, as they are."""
    os.environ |= {
        "LANGFUSE_HOST": url,
        "LANGFUSE_BASE_URL": url,
        "LANGFUSE_PUBLIC_KEY": "p",
        "LANGFUSE_SECRET_KEY": "s",
    }
    from langfuse import get_client
    from langfuse.langchain import CallbackHandler

    handler = CallbackHandler()
    play({"callbacks": [handler]})
    client = get_client()
    client.create_score(
        trace_id=handler.last_trace_id, name="correct", value=1.0, comment="checked"
    )
    client.flush()
    time.sleep(2)
    for path, kind, body in BODIES:
        print(path, kind, len(body), file=sys.stderr)
    return otlp_lines()


def agents(url: str) -> bytes:
    """What the exporter of OpenAI's Agents SDK sends, a line per request."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
    from agents.tracing import set_trace_processors
    from agents.tracing.processors import BackendSpanExporter, BatchTraceProcessor
    from openai import AsyncOpenAI

    processor = BatchTraceProcessor(
        BackendSpanExporter(api_key="k", endpoint=url + "/v1/traces/ingest")
    )
    set_trace_processors([processor])

    @function_tool
    def look_up(product: str) -> str:
        """The price of a product."""
        return PRICES[product]

    model = OpenAIChatCompletionsModel("gpt-scripted", AsyncOpenAI())
    seller = Agent("seller", instructions="You sell.", model=model, tools=[look_up])
    for product in PRICES:
        asyncio.run(Runner.run(seller, f"What does a {product} cost?"))
    processor.force_flush()
    return b"".join(body.strip() + b"\n" for path, _, body in BODIES if path.endswith("/ingest"))


def console(url: str) -> bytes:
    """The spans of OpenInference's instrumentation as the SDK's `to_json` writes them."""
    from openinference.instrumentation.langchain import LangChainInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    LangChainInstrumentor().instrument(tracer_provider=provider)
    play()
    return "".join(span.to_json(indent=None) + "\n" for span in kept.get_finished_spans()).encode()


def completions(url: str) -> bytes:
    """Stored completions, each with its messages, as OpenAI's client has them."""
    from openai import OpenAI

    client, lines = OpenAI(), []
    for product in PRICES:
        messages: list[Any] = [{"role": "user", "content": f"What does a {product} cost?"}]
        tools: list[Any] = [{"type": "function", "function": TOOL}]
        said = client.chat.completions.create(model="gpt-scripted", messages=messages, tools=tools)
        about = {"messages": messages, "tools": tools, "metadata": {"agent": "seller"}}
        lines.append(json.dumps(said.model_dump() | about))
    return ("\n".join(lines) + "\n").encode()


def atif(url: str) -> bytes:
    """A trajectory of Harbor, by its own models."""
    from harbor.models import trajectories as harbor

    called = harbor.ToolCall(
        tool_call_id="c1", function_name="look_up", arguments={"product": "rug"}
    )
    seen = harbor.ObservationResult(source_call_id="c1", content="35")
    metrics = harbor.Metrics(prompt_tokens=20, completion_tokens=5, cost_usd=0.1)
    steps = [
        harbor.Step(step_id=1, source="system", message="You sell."),
        harbor.Step(step_id=2, source="user", message="What does a rug cost?"),
        harbor.Step(
            step_id=3, source="agent", message="", tool_calls=[called], metrics=metrics,
            observation=harbor.Observation(results=[seen]), timestamp="2026-01-01T00:00:00Z",
        ),
        harbor.Step(step_id=4, source="agent", message="It costs 35.", reasoning_content="35."),
    ]  # fmt: skip
    made = harbor.Trajectory(
        session_id="s1", steps=steps,
        agent=harbor.Agent(
            name="seller", version="1", model_name="gpt-scripted",
            tool_definitions=[{"type": "function", "function": TOOL}],
        ),
    )  # fmt: skip
    return (made.model_dump_json(exclude_none=True) + "\n").encode()


def shorten(source: str) -> bytes:
    """A transcript of a harness without the harness's own texts and the folders of this machine:
    long texts by their length, one tool of many."""
    return b"".join(
        json.dumps(_short(json.loads(line))).encode() + b"\n"
        for line in Path(source).read_text().splitlines()
        if '"attachment"' not in line or '"prompt_snapshot"' in line
    )


def _short(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _short(one, name) for name, one in value.items()}
    if isinstance(value, list):
        kept = [
            one for one in value if key != "tools" or one in ("Bash",) or "Bash" in str(one)[:60]
        ]
        return [_short(one, key) for one in kept]
    if isinstance(value, str):
        if key == "description" or len(value) > 1000 or value.startswith("<"):
            return f"({len(value)} characters)"
        return re.sub(r"/tmp/[\w/.-]*?/(?=repo)", "/", value)
    return value


if __name__ == "__main__":
    if sys.argv[1] == "shorten":
        Path(sys.argv[3]).write_bytes(shorten(sys.argv[2]))
        sys.exit()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    os.environ |= {"OPENAI_BASE_URL": address + "/v1", "OPENAI_API_KEY": "k"}
    Path(sys.argv[2]).write_bytes(globals()[sys.argv[1]](address))
