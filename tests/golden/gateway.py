"""Requests of four APIs, the bytes that the gateway answers, what it asks the policy server, and
the rows that it leaves in the store: `gateway.jsonl`."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.golden import access, api_requests, files
from tests.golden.api_requests import Step
from tests.golden.engine import Engine

KEYS = {"messages": "x-api-key", "google": "x-goog-api-key"}  # header; default: bearer
HEADERS = ("content-type", "retry-after", "x-should-retry")
# Names that are drawn anew in every process -> a number in the order of appearance.
DRAWN = re.compile(
    r"\b(resp|msg|rs|fc|ctc|call|toolu|chatcmpl|cmpl|req|conv|item|cmp)[_-]([0-9a-f]{12,})\b"
    r"|\b([0-9a-f]{32})\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
)
TIMES = re.compile(r'("(?:created|created_at|completed_at)": ?)\d+(?:\.\d+)?')
PORT = re.compile(r"(127\.0\.0\.1|localhost):\d+")
DEFAULTS: dict[str, Any] = {
    "policy": "policy", "role": "agent", "exact": True, "span": None, "repeats": None,
    "left_out": [], "spans": [], "processors": {}, "images": [], "version": 7, "tools": [],
}  # fmt: skip
UNSTORED = ("id", "attempt", "started", "seconds")


class Names:
    """Numbers drawn names, equal ones equally."""

    def __init__(self, key: str, attempt: str, rollout: str) -> None:
        self.known = {key: "KEY", attempt: "ATTEMPT", rollout: "ROLLOUT"}
        self.count = 0

    def __call__(self, text: str) -> str:
        for name, shown in self.known.items():
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", shown, text)
        text = TIMES.sub(r"\g<1>0", PORT.sub(r"\1:PORT", text))
        return DRAWN.sub(self._numbered, text)

    def _numbered(self, found: re.Match[str]) -> str:
        if found[0] not in self.known:
            self.count += 1
            self.known[found[0]] = f"{found[1] or 'id'}_{self.count}"
        return self.known[found[0]]


async def play(folder: Path) -> dict[str, files.Case]:
    """Every case, each by an attempt of its own."""
    engine, found = Engine(), dict[str, files.Case]()
    url = await engine.start()
    try:
        with access.without_pauses():
            async with (
                access.ServedGateway(folder, url) as gateway,
                httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
            ):
                for api in api_requests.APIS:
                    for name, stream, steps in api_requests.cases(api):
                        case = f"{api}: {name}{', streamed' if stream else ''}"
                        assert case not in found
                        found[case] = await played(gateway, http, engine, api, steps)
    finally:
        await engine.stop()
    return found


async def played(
    gateway: access.ServedGateway,
    http: httpx.AsyncClient,
    engine: Engine,
    api: str,
    steps: list[Step],
) -> files.Case:
    key, active = await gateway.attempt()
    names, answers, last = Names(key, active.id, active.attempt.rollout.id), [], ""
    engine.requests.clear()
    for step in steps:
        engine.script = list(step.replies)
        used = step.key or key
        header = {KEYS[api]: used} if api in KEYS else {"authorization": f"Bearer {used}"}
        raw = None if step.body is None else json.dumps(step.body).replace("$response", last)
        path = (step.prefix + step.path).replace("{attempt}", active.id).replace("$response", last)
        if step.key == "-":
            header = {}
        request = http.build_request(
            step.method, path, content=raw, headers=header | {"content-type": "application/json"}
        )
        reply, text, whole = await answered(http, request)
        response = re.search(r'"(resp_\w+)"', text)
        last = response[1] if response else last
        shown = {name: reply.headers[name] for name in HEADERS if name in reply.headers}
        answers.append({"status": reply.status_code, "headers": shown, "body": names(text)})
        if not whole:
            answers[-1]["broken off"] = True
    rows, failures = await gateway.recorded(active)
    sent = [json.loads(names(json.dumps(body, ensure_ascii=False))) for body in engine.requests]
    return {
        "answers": answers,
        "sent": sent,
        "rows": [row(one, sent, names) for one in rows],
        "fails": [names(text) for text in failures],
    }


async def answered(
    http: httpx.AsyncClient, request: httpx.Request
) -> tuple[httpx.Response, str, bool]:
    """The response, what came of its body, and whether that ended as HTTP says."""
    raw, whole = b"", True
    reply = await http.send(request, stream=True)
    try:
        async for part in reply.aiter_bytes():
            raw += part
    except httpx.RemoteProtocolError:
        whole = False
    finally:
        await reply.aclose()
    return reply, raw.decode(), whole


def row(record: dict[str, Any], sent: list[Any], names: Names) -> dict[str, Any]:
    """What is stored of a call, without what it has by default or was sent upstream."""
    kept = {key: value for key, value in record.items() if key not in UNSTORED}
    kept["logprobs"] = [round(x, 4) for x in kept["logprobs"]]
    kept = json.loads(names(json.dumps(kept, ensure_ascii=False)))
    kept = {k: v for k, v in kept.items() if not (k in DEFAULTS and v == DEFAULTS[k])}
    for name in ("messages", "tools"):
        for number, body in enumerate(sent):
            if name in kept and kept[name] == body.get(name):
                kept[name] = f"as sent {number}"
    return kept


def cases() -> Iterator[tuple[str, files.Case]]:
    with tempfile.TemporaryDirectory() as folder:
        yield from asyncio.run(play(Path(folder))).items()


if __name__ == "__main__":
    files.main("gateway", cases)
