#!/usr/bin/env bash
# Natural guess: if a span has more attributes than its limit allows, the last ones are missing: OpenTelemetry's
# specification has the attribute discarded whose addition would exceed the limit.
# What is so: the SDK for Python discards the oldest one for each that is added. OpenInference writes a conversation as three
# or more attributes for each message, so that in a span with 60 messages the model's name, the system prompt and the first
# messages are gone and the end is there. Messages given when the span starts push each other out in the same way.
# Why it matters: recorded conversations are trained on and scored. Those of long agents come back without the instructions,
# the tools and the question: a list of messages that starts in the middle, here with one that has lost its role.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check opentelemetry-sdk==1.45.2 \
    openinference-instrumentation==0.1.72 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version

from openinference.instrumentation import get_llm_attributes
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
tracer = provider.get_tracer("agent")


def messages(turns: int) -> list[dict]:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Book a room."}]
    for number in range(turns):
        call = {"id": f"c{number}", "function": {"name": "look", "arguments": "{}"}}
        talk += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": "no"}]
    return talk


def recorded(turns: int, at_start: bool) -> dict:
    attributes = get_llm_attributes(model_name="small", input_messages=messages(turns))
    with tracer.start_as_current_span("call", attributes=attributes if at_start else None) as span:
        if not at_start:
            span.set_attributes(attributes)
    return dict(kept.get_finished_spans()[-1].attributes)


print(*(f"{name} {version(name)}" for name in ("opentelemetry-sdk", "openinference-instrumentation")), sep=", ")
seen = {}
for turns in (10, 29):
    for at_start in (False, True):
        attributes = recorded(turns, at_start)
        numbers = [int(name.split(".")[2]) for name in attributes if name.startswith("llm.input_messages.")]
        first, last = min(numbers), max(numbers)
        model, role = "llm.model_name" in attributes, f"llm.input_messages.{first}.message.role" in attributes
        seen[turns, at_start] = model, role, first, last
        print(
            f"{2 + 2 * turns} messages {'at the start' if at_start else 'in the span'}: {len(attributes)} attributes,",
            f"messages {first} to {last}, {'with' if model else 'without'} the model's name,",
            f"the first one {'with' if role else 'without'} its role",
        )
whole, cut = (True, True, 0, 21), (False, False, 23, 59)
sys.exit(seen != {(10, False): whole, (10, True): whole, (29, False): cut, (29, True): cut})
PY
