"""The expert behind an OpenAI-compatible address, and what LangSmith receives."""

import json
import random
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

RATE = 1 - 0.8 ** (1 / 3)  # of mistakes of a node, so that a fifth of the traces have one


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for each answer; two would wait for the client's acknowledgement
    slips = random.Random(0)
    runs: ClassVar[dict[str, dict[str, Any]]] = {}
    feedback: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.endswith("/chat/completions"):
            self._send(self._complete(body["messages"]))
        elif self.path.endswith("/feedback"):
            self.feedback.append(body)
            self._send({})
        else:
            run = self.runs.setdefault(body.get("id") or self.path.rsplit("/", 1)[-1], {})
            run.update({key: value for key, value in body.items() if value is not None})
            self._send({})

    do_PATCH = do_POST  # noqa: N815 - named by the method of HTTP

    def do_GET(self) -> None:
        self._send({"version": "0", "instance_flags": {}})

    def _complete(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        import expert  # the agent's client reads this server's address when it is imported

        system, user = (message["content"] for message in messages)
        said = {"role": "assistant", "content": expert.answer(system, user, self.slips, RATE)}
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        card = {"id": "1", "object": "chat.completion", "created": 0, "model": "expert"}
        return card | {"choices": [choice]}

    def _send(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...
