#!/usr/bin/env bash
# Guess: if a model makes two tool calls in one answer, they run and come back in that order, streamed or not.
# So it is: Haystack's Agent with an OpenAIResponsesChatGenerator keeps the order of an answer that came whole. If the answer
#   is streamed, the calls are sorted by the ids of their items, which servers draw at random (`fc_68e1...`): half of the
#   pairs come back reversed, the second call run first.
# Why it matters: in these turns the policy reads a conversation that it did not sample (save, then draw), tools that depend
#   on their order fail by a coin toss that no seed of the policy fixes, and the reward is that of another trajectory.
set -eu
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env && env/bin/python -m pip install -q --disable-pip-version-check \
    haystack-ai==3.4.1 openai==3.57.0 2>pip.txt || { cat pip.txt; exit 2; }
HAYSTACK_TELEMETRY_ENABLED=False env/bin/python - <<'PYTHON'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

def calls(ids):
    call = {"type": "function_call", "arguments": "{}", "status": "completed"}
    return [call | {"id": id, "call_id": f"call_{name}", "name": name} for id, name in zip(ids, ("draw", "save"))]

ids = []
WORDS = [{"type": "message", "id": "m", "role": "assistant", "status": "completed",
          "content": [{"type": "output_text", "text": "Done.", "annotations": []}]}]
asked = []

def events(output):
    base = {"id": "r", "object": "response", "created_at": 1, "model": "m", "tools": [], "tool_choice": "auto",
            "parallel_tool_calls": True, "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
            "temperature": 1, "top_p": 1, "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2,
            "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}}
    whole = base | {"status": "completed", "output": output}
    yield {"type": "response.created", "response": base | {"status": "in_progress", "output": []}}
    for k, item in enumerate(output):
        if item["type"] == "message":
            text = item["content"][0]["text"]
            at = {"item_id": "m", "output_index": k, "content_index": 0}
            yield {"type": "response.output_item.added", "output_index": k, "item": item | {"content": []}}
            yield {"type": "response.output_text.delta", "delta": text, "logprobs": []} | at
            yield {"type": "response.output_text.done", "text": text, "logprobs": []} | at
        else:
            at = {"item_id": item["id"], "output_index": k}
            yield {"type": "response.output_item.added", "output_index": k, "item": item | {"arguments": "", "status": "in_progress"}}
            yield {"type": "response.function_call_arguments.delta", "delta": item["arguments"]} | at
            yield {"type": "response.function_call_arguments.done", "name": item["name"], "arguments": item["arguments"]} | at
        yield {"type": "response.output_item.done", "output_index": k, "item": item}
    yield {"type": "response.completed", "response": whole}

class Model(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append(body)
        called = any(item.get("type") == "function_call_output" for item in body["input"])
        all_of_them = list(events(WORDS if called else calls(ids)))
        if body.get("stream"):
            parts = (f"event: {e['type']}\ndata: {json.dumps(e | {'sequence_number': n})}\n\n" for n, e in enumerate(all_of_them))
            text, kind = "".join(parts), "text/event-stream"
        else:
            text, kind = json.dumps(all_of_them[-1]["response"]), "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

def draw() -> str:
    """Draw the picture."""
    return "drawn"

def save() -> str:
    """Save the picture."""
    return "saved"

url, key = f"http://127.0.0.1:{server.server_port}/v1", Secret.from_token("k")
print(*(f"{p} {version(p)}" for p in ("haystack-ai", "openai")), sep=", ")
order = {}
for ids[:] in (["fc_68e1", "fc_f03b"], ["fc_f03b", "fc_68e1"]):
    for callback in (None, lambda chunk: None):
        asked.clear()
        model = OpenAIResponsesChatGenerator(model="m", api_base_url=url, api_key=key)
        tools = [create_tool_from_function(one) for one in (draw, save)]
        agent = Agent(chat_generator=model, tools=tools, streaming_callback=callback)
        agent.run(messages=[ChatMessage.from_user("Draw and save.")])
        back = [item["name"] for item in asked[-1]["input"] if item.get("type") == "function_call"]
        how = "streamed" if callback else "whole"
        order[how, ids[0]] = back
        print(f"draw is {ids[0]}, save is {ids[1]}; {how}: comes back as", ", ".join(back))
sys.exit(order != {
    ("whole", "fc_68e1"): ["draw", "save"], ("streamed", "fc_68e1"): ["draw", "save"],
    ("whole", "fc_f03b"): ["draw", "save"], ("streamed", "fc_f03b"): ["save", "draw"],
})
PYTHON
