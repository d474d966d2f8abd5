#!/usr/bin/env bash
# Natural guess: the span of a tool in OpenInference's instrumentation of LangChain (Phoenix, Arize) has the tool's arguments
# in `input.value`, as a JSON object.
# What is so: if the only argument is a text, `input.value` is that text alone, without the argument's name and, if it
# is no JSON, without a mime type; any other call, also one argument that is a number or a list, is an object. A text that is JSON itself cannot be
# told from arguments: search({"query": '{"n": 7}'}) and count({"n": 7}) have the same value.
# Why it matters: tools are replayed or scored from recorded spans. The commonest tools (search, run, read) have one text, and
# whoever parses the value as arguments gets an error for them, or other arguments than were sent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check langchain-core==1.7.2 opentelemetry-sdk==1.44.0 \
    openinference-instrumentation-langchain==0.1.80
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version
from langchain_core.tools import tool
from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
LangChainInstrumentor().instrument(tracer_provider=provider)

@tool
def search(query: str) -> str:
    """Search."""
    return query

@tool
def count(n: int) -> int:
    """Count."""
    return n

@tool
def add(a: str, b: str) -> str:
    """Add."""
    return a + b

calls = [(search, {"query": "rug"}), (search, {"query": '{"n": 7}'}), (count, {"n": 7}), (add, {"a": "x", "b": "y"})]
for function, arguments in calls:
    function.invoke({"name": function.name, "args": arguments, "id": "call_1", "type": "tool_call"})
print("openinference-instrumentation-langchain", version("openinference-instrumentation-langchain"))
values = []
for span, (_, arguments) in zip(spans.get_finished_spans(), calls):
    values.append(span.attributes["input.value"])
    print(f"{span.name}({arguments}): {values[-1]!r}, {span.attributes.get('input.mime_type')}")
sys.exit(values != ["rug", '{"n": 7}', '{"n": 7}', '{"a": "x", "b": "y"}'])
PY
