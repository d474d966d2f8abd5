#!/usr/bin/env bash
# Guess: an agent that asks its model for function calls (`tools`, `tool_choice`) sends them back as function calls.
# So it is: smolagents' ToolCallingAgent reads the calls of the answer, and writes them into the next request as an
#   assistant's words, `Calling tools:\n[{'id': ...}]`, a Python list, with the result as a user's message. The request has
#   no `tool_calls` and no tool message, and its `stop` has "Calling tools:", so that the model cannot write what the
#   conversation shows that it wrote.
# Why it matters: no turn continues the one before, whatever the chat template: each call is a training row of its own, and
#   the policy sees calls in a form that is neither its template's nor one that it may sample.
set -eu
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env && env/bin/python -m pip install -q --disable-pip-version-check \
    "smolagents[openai]==1.26.0" openai==3.57.0 2>pip.txt || { cat pip.txt; exit 2; }
cat > try.py <<'PYTHON'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

asked = []

class Model(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        if len(asked) > 1:
            function = {"name": "final_answer", "arguments": '{"answer": "3"}'}
        call = {"id": f"c{len(asked)}", "type": "function", "function": function}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": said, "finish_reason": "tool_calls"}
        use = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        text = json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": use})
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()

from smolagents import OpenAIModel, ToolCallingAgent, tool

@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: another
    """
    return a + b

model = OpenAIModel("m", api_base=f"http://127.0.0.1:{server.server_port}/v1", api_key="k")
ToolCallingAgent([add], model, verbosity_level=0).run("What is 1 plus 2?")
print(*(f"{p} {version(p)}" for p in ("smolagents", "openai")), sep=", ")
second = asked[1]
for message in second["messages"][1:]:
    text = message["content"][0]["text"] if isinstance(message["content"], list) else message["content"]
    print(" ", message["role"] + ":", repr(text[:110]))
print("  tools offered:", [t["function"]["name"] for t in second["tools"]], "stop:", second.get("stop"))
as_calls = any(m.get("tool_calls") or m["role"] == "tool" for m in second["messages"])
words = any("Calling tools:" in json.dumps(m) for m in second["messages"] if m["role"] == "assistant")
sys.exit(as_calls or not words or "Calling tools:" not in (second.get("stop") or ()))
PYTHON
env/bin/python try.py
