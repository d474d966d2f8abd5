"""A server of one model that always says the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serving(text: str) -> Iterator[str]:
    """Serve the model "m1" inside the block; yields the URL."""

    class Model(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "m1"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            said = {"role": "assistant", "content": text}
            choice = {"index": 0, "finish_reason": "stop", "message": said}
            self._send({"id": "1", "created": 1, "model": asked["model"], "choices": [choice]})

        def _send(self, body: dict[str, Any]) -> None:
            raw = json.dumps({"object": "chat.completion"} | body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
