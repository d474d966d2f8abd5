"""Requests that real harnesses sent, with fillers for their words: `requests/NAME.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.runners.apis import google, messages, responses
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.apis import OWN
from agentrl.runners.gateway.request import ModelRequest, read_request

REQUESTS = Path(__file__).parent / "requests"
HARNESSES = sorted(file.stem for file in REQUESTS.glob("*.json"))


@dataclass(frozen=True)
class StoredRequest:
    call: str  # what the harness makes it for
    role: str  # that the rules of its preset find
    path: str
    headers: dict[str, str]  # KEY stands for the attempt's key
    body: dict[str, Any]


def stored(harness: str) -> list[StoredRequest]:
    """In the order of the harness; requests that offer the same tools share them in the file."""
    data = json.loads((REQUESTS / f"{harness}.json").read_text())
    for request in data["requests"]:
        if "tools" in (body := request["body"]):
            body["tools"] = data["tools"][body["tools"]]
    return [StoredRequest(**request) for request in data["requests"]]


def as_chat(request: StoredRequest) -> ModelRequest:
    """The chat completion that it becomes."""
    translated = {"/v1/responses": responses.DIALECT, "/v1/messages": messages.DIALECT}
    known = OWN | translated | {":": google.dialect("policy", stream=False)}
    dialect = next(dialect for path, dialect in known.items() if path in request.path)
    return read_request(dialect, json.dumps(request.body).encode(), ConversationMemory(), 0)
