#!/usr/bin/env bash
# Guess: whether a LangChain agent streams its model or not, the same answer has the same effect.
# So it is: the arguments of a tool call that a length limit cut off (`{"seats": 2, "day": "Monday", "only_check": tru`)
#   are refused if the answer came whole: no tool runs, and the model reads that they "were malformed or truncated". If
#   the same answer is streamed, the chunks' arguments go through `parse_partial_json`, which closes what is open and drops
#   what is not finished, and the tool runs, here without the `only_check` that the model was about to write. The next request
#   shows the repaired arguments as the model's own.
# Why it matters: with max_tokens in a run, the environment rewards calls that the policy did not write, only where the
#   agent streams; and the conversation that the policy reads is not the one that it sampled.
set -eu
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env && env/bin/python -m pip install -q --disable-pip-version-check \
    langchain==1.5.2 langchain-openai==1.7.4 langchain-core==1.8.3 2>pip.txt || { cat pip.txt; exit 2; }
env/bin/python - <<'PYTHON'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

CUT = '{"seats": 2, "day": "Monday", "only_check": tru'
asked = []

class Model(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append(body)
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "book", "arguments": CUT}}
        first = not any(m["role"] in ("assistant", "tool") for m in body["messages"])
        said = {"role": "assistant", "content": None if first else "done"} | ({"tool_calls": [call]} if first else {})
        finish = "length" if first else "stop"
        base = {"id": "x", "created": 1, "model": "m"}
        if body.get("stream"):
            chunks = [{"index": 0, "delta": said, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": finish}]
            events = [json.dumps(base | {"object": "chat.completion.chunk", "choices": [c]}) for c in chunks]
            text, kind = "".join(f"data: {e}\n\n" for e in [*events, "[DONE]"]), "text/event-stream"
        else:
            whole = [{"index": 0, "message": said, "finish_reason": finish}]
            text, kind = json.dumps(base | {"object": "chat.completion", "choices": whole}), "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

ran = []

def book(seats: int, day: str, only_check: bool = False) -> str:
    """Book seats."""
    ran.append({"seats": seats, "day": day, "only_check": only_check})
    return "booked"

url = f"http://127.0.0.1:{server.server_port}/v1"
print(*(f"{p} {version(p)}" for p in ("langchain", "langchain-openai", "langchain-core")), sep=", ")
seen = {}
for streamed in (False, True):
    ran.clear()
    asked.clear()
    model = ChatOpenAI(model="m", base_url=url, api_key="k", streaming=streamed)
    create_agent(model, [book]).invoke({"messages": [("user", "Are two seats free on Monday?")]})
    back = [c["function"]["arguments"] for m in asked[-1]["messages"] for c in m.get("tool_calls") or ()]
    seen[streamed] = list(ran)
    print("streamed:" if streamed else "whole:   ", "the tool ran with", ran or "nothing", "- sent back as", back or "nothing")
sys.exit(seen != {False: [], True: [{"seats": 2, "day": "Monday", "only_check": False}]})
PYTHON
