#!/usr/bin/env bash
# Guess: if a conversation is continued by giving an agent the earlier messages and a new one, the new request begins with
#   the messages of the earlier request.
# So it is: CrewAI's Agent.kickoff(messages) writes "\nCurrent Task: " before the last user's message, and after it
#   "Provide your complete response:", and does so for that one only. Asked again, the message is history and has lost both, so
#   the second question's request differs from the first's in its first user's message.
# Why it matters: conversations of several questions share no prefix beyond the system prompt: each question is a row of its
#   own, a cache of prompts saves nothing, and the policy is rewarded for a first turn that it will never read again.
set -eu
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env && env/bin/python -m pip install -q --disable-pip-version-check \
    crewai==1.15.30 2>pip.txt || { cat pip.txt; exit 2; }
HOME=$folder CREWAI_DISABLE_TELEMETRY=true CREWAI_TRACING_ENABLED=false OTEL_SDK_DISABLED=true env/bin/python - >panels.txt <<'PYTHON'
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

asked = []

class Model(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        choice = {"index": 0, "message": {"role": "assistant", "content": "Blue."}, "finish_reason": "stop"}
        use = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        text = json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": use})
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()

from crewai import LLM, Agent

model = LLM(model="openai/gpt-4o-mini", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k")
painter = Agent(role="painter", goal="choose colours", backstory="b", llm=model)
talk = [{"role": "user", "content": "Which colour?"}]
talk.append({"role": "assistant", "content": painter.kickoff(talk).raw})
talk.append({"role": "user", "content": "Are you sure?"})
painter.kickoff(talk)
print("crewai", version("crewai"), file=sys.stderr)
first, second = ([m for m in body["messages"] if m["role"] != "system"] for body in asked)
for number, messages in enumerate((first, second), 1):
    print(f"  request {number}:", [m["content"] for m in messages], file=sys.stderr)
asked_first, history = first[0]["content"], second[0]["content"]
os._exit(not (history != asked_first and history in asked_first and "Current Task" in asked_first))
PYTHON
