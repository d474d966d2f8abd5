#!/usr/bin/env bash
# Natural guess: if an agent emits a reward while it scores itself and another when it is done, Agent Lightning trains on the
# last one, which its runner logs as "Final reward" and `find_final_reward` documents as "the latest reward span".
# What is so: the adapter that makes training data of spans gives each model call one reward. The first after the last call
# is that call's; the next is handed to the call before it, and so on backwards, and what is left over is dropped. Training
# takes the reward of the last call, so it is the first: emit_reward(0.1) for the format and then 1.0 for the answer trains
# on 0.1 and logs 1.0. A reward after each call is no better off: the last call's alone counts.
# Why it matters: the curve of a run is that of one reward and its gradient that of another. Whoever emits parts before the
# total trains on the first part, say the format, and sees the total rise or fall by chance.
# The package is installed without what only other parts need (verl, litellm, AgentOps); a stand-in takes their places.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check opentelemetry-sdk==1.45.2 pydantic==2.13.5
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps agentlightning==0.3.0
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

[root] = find_spec("agentlightning").submodule_search_locations
for name in ("agentlightning", "agentlightning.emitter", "agentlightning.adapter", "agentlightning.utils"):
    package = sys.modules[name] = ModuleType(name)  # without its __init__, which imports everything
    package.__path__ = ["/".join([root, *name.split(".")[1:]])]
for name in ("agentops", "agentops.sdk", "agentops.sdk.exporters", "agentlightning.utils.otlp",
             "agentlightning.tracer", "agentlightning.tracer.base", "agentlightning.tracer.dummy"):
    sys.modules[name] = MagicMock()

from agentlightning.adapter.triplet import TracerTraceToTriplet
from agentlightning.emitter.reward import find_final_reward
from agentlightning.types import Span

def span(number, name, attributes):
    known = {"rollout_id": "r", "attempt_id": "a", "trace_id": "t", "sequence_id": number, "span_id": str(number)}
    times = {"start_time": float(number), "end_time": number + (99 if number == 0 else 0.5)}
    return Span.from_attributes(name=name, attributes=attributes, parent_id="0" if number else None, **known, **times)

def rollout(events):
    spans = [span(0, "rollout", {})]
    for number, event in enumerate(events, 1):
        if event == "call":
            tokens = {"prompt_token_ids": [1, number], "response_token_ids": [number]}
            spans.append(span(number, "openai.chat.completion", tokens))
        else:  # as emit_reward writes it
            own = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": event}
            spans.append(span(number, "agentlightning.annotation", own))
    return spans

print("agentlightning", version("agentlightning"))
expected = {  # events -> rewards of the calls, what training takes, what the runner logs
    ("call", "call", 1.0): ([None, 1.0], 1.0, 1.0),
    ("call", "call", 0.1, 1.0): ([1.0, 0.1], 0.1, 1.0),
    ("call", "call", 0.1, 0.2, 1.0): ([0.2, 0.1], 0.1, 1.0),
    ("call", 0.5, "call", 0.25, 1.0): ([0.5, 0.25], 0.25, 1.0),
}
seen = {}
for events in expected:
    spans = rollout(events)
    of_calls = [triplet.reward for triplet in TracerTraceToTriplet().adapt(spans)]
    # As verl/daemon.py reads them: backwards, up to the first call that has one.
    trained = next(value for value in reversed(of_calls) if value is not None)
    seen[events] = of_calls, trained, find_final_reward(spans)
    print(f"{events}: calls have {of_calls}, trained on {trained}, logged {seen[events][2]}")
sys.exit(seen != expected)
PY
