"""A chat completions server that plays both roles and the reflector with scripts:

python examples/orders/model.py 8899
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from world import MODELS, reflect


def answer(body: dict[str, Any]) -> str:
    last = body["messages"][-1]["content"]
    if body["model"].startswith("reflector"):
        return reflect(last, int(body["model"].partition("-")[2] or 0))
    system = " ".join(m["content"] for m in body["messages"] if m["role"] == "system")
    return MODELS[body["model"]](system.split("\nToday is")[0], last)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said, sizes = answer(body), [len(m["content"]) // 4 for m in body["messages"]]
        counts = {"prompt_tokens": sum(sizes), "completion_tokens": len(said) // 4}
        message = {"role": "assistant", "content": said}
        whole = {
            "id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {**counts, "total_tokens": sum(counts.values())},
        }  # fmt: skip
        out = json.dumps(whole).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    def log_message(self, *said: Any) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
