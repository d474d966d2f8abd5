#!/usr/bin/env bash
# Guess: a second question to an agent is one request to its model.
# So it is: a Strands Agent runs each call `agent("...")` in an event loop of its own, and its AnthropicModel keeps one client
#   for all of them. The second question goes out over a pooled connection of the loop that has ended, reading the answer
#   raises "Event loop is closed", anthropic's SDK takes that for a broken connection and asks again. Every question but the
#   first reaches the model twice, nothing is logged, and nobody reads the first of the two answers.
# Why it matters: a server that samples gives two answers to one turn. Who trains on what a proxy recorded trains on calls
#   that had no consequence, and counts more calls than the agent made.
set -eu
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env && env/bin/python -m pip install -q --disable-pip-version-check \
    "strands-agents[anthropic]==1.62.0" anthropic==0.125.0 2>pip.txt || { cat pip.txt; exit 2; }
env/bin/python - <<'PYTHON'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

asked = []

class Model(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_): pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append((body["messages"][-1]["content"][0]["text"], self.headers.get("x-stainless-retry-count")))
        about = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
                 "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
        events = [
            {"type": "message_start", "message": about},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Blue."}},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        ]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in events:
            text = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
        self.wfile.write(b"0\r\n\r\n")

server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()

from strands import Agent
from strands.models.anthropic import AnthropicModel

print(*(f"{p} {version(p)}" for p in ("strands-agents", "anthropic", "httpx")), sep=", ")
client = {"base_url": f"http://127.0.0.1:{server.server_port}", "api_key": "k"}
agent = Agent(model=AnthropicModel(client_args=client, model_id="m", max_tokens=16), callback_handler=None)
for question in ("one", "two", "three"):
    agent(question)
print("asked, with the SDK's count of its tries:", asked)
sys.exit([text for text, _ in asked] != ["one", "two", "two", "three", "three"])
PYTHON
