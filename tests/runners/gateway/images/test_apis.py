"""Images by every API that agents speak: the same stored messages, and the same file."""

from __future__ import annotations

import json
from base64 import b64encode, urlsafe_b64encode
from typing import Any

import pytest

from tests.runners.conftest import Bench
from tests.runners.gateway.images.calls import (
    BLUE,
    DIGESTS,
    RED,
    TEXT,
    ask,
    named,
    shown,
    stored,
    user,
)
from tests.runners.gateway.images.pictures import picture, url

WORDS = str(TEXT["text"])
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
LOOK = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def result(*parts: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": [*parts]}


def base64(body: bytes, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": b64encode(body).decode()}
    return {"type": "image", "source": source}


def anthropic(stream: bool) -> tuple[str, dict[str, Any]]:
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    told = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, base64(BLUE)]}
    messages = [
        {"role": "user", "content": [base64(RED), TEXT]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [told]},
    ]
    return "/messages", {"max_tokens": 9, "messages": messages, "stream": stream}


def responses(stream: bool) -> tuple[str, dict[str, Any]]:
    parts = [
        {"type": "input_image", "image_url": url(RED)},
        {"type": "input_text", "text": WORDS},
    ]
    output = [{"type": "input_text", "text": WORDS}]
    output += [{"type": "input_image", "image_url": url(BLUE)}]
    items = [
        {"role": "user", "content": parts},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    return "/responses", {"input": items, "stream": stream}


def inline(body: bytes, encode: Any = b64encode) -> dict[str, Any]:
    return {"inlineData": {"mimeType": "image/png", "data": encode(body).decode()}}


def google(stream: bool) -> tuple[str, dict[str, Any]]:
    answer = {"name": "look", "id": "c", "response": {"output": WORDS}, "parts": [inline(BLUE)]}
    contents = [
        {"role": "user", "parts": [inline(RED), {"text": WORDS}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look", "id": "c", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": answer}]},
    ]
    verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
    return f"/models/m:{verb}", {"contents": contents}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", [anthropic, responses, google])
async def test_images_of_users_and_tools(bench: Bench, api: Any, stream: bool) -> None:
    path, body = api(stream)
    answer, (call,), _ = await ask(bench, body, path=path)
    assert answer.status_code == 200, answer.text
    assert call.messages == [user(named(RED), TEXT), LOOK, result(TEXT, named(BLUE))]
    assert call.images == (DIGESTS[RED], DIGESTS[BLUE])
    assert call.exact
    assert bench.model.requests[0]["messages"] == [
        user(shown(RED), TEXT),
        LOOK,
        result(TEXT, shown(BLUE)),
    ]
    assert await stored(bench) == 2


async def test_a_screenshot_after_an_action(bench: Bench) -> None:
    click = {"type": "click", "x": 3, "y": 4, "button": "left"}
    call = {"type": "computer_call", "call_id": "c", "action": click, "pending_safety_checks": []}
    screen = {"type": "computer_screenshot", "image_url": url(RED)}
    output = {"type": "computer_call_output", "call_id": "c", "output": screen}
    items = [{"role": "user", "content": "go"}, call, output]
    answer, (row,), _ = await ask(bench, {"input": items}, path="/responses")
    assert answer.status_code == 200, answer.text
    _, said, told = row.messages
    assert said["tool_calls"][0]["function"]["name"] == "computer"
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == click
    assert told == result(named(RED))


async def test_a_conversation_goes_on_with_its_images(bench: Bench) -> None:
    """The agent sends only what is new; the gateway remembers the rest, with its images."""
    active = bench.gateway.register(await bench.attempt())
    first = {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": url(RED)}]}]}  # fmt: skip
    import httpx

    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        answer = (await http.post("/responses", json={"model": "m"} | first)).json()
        more = {"input": "and now?", "previous_response_id": answer["id"], "model": "m"}
        assert (await http.post("/responses", json=more)).status_code == 200
    trace = await bench.store.trace(active.attempt.rollout.id)
    assert trace is not None
    assert [call.images for call in trace.transitions] == [(DIGESTS[RED],)] * 2
    assert bench.model.requests[1]["messages"][0] == user(shown(RED))


async def test_googles_client_writes_base64_for_urls(bench: Bench) -> None:
    body = next(
        file for n in range(1, 99)
        if b"-" in urlsafe_b64encode(file := picture(size=(n, 3)))
        and b"_" in urlsafe_b64encode(file)
    )  # fmt: skip
    contents = [{"parts": [inline(body, urlsafe_b64encode)]}]
    answer, (call,), _ = await ask(bench, {"contents": contents}, path="/models/m:generateContent")
    assert answer.status_code == 200, answer.text
    (image,) = (await bench.store.images("test", call.images)).values()
    assert image.body == body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "https://x.org/a.png"}}]}]}),
        ("/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": None}}]}]}),
        ("/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "https://x.org/a.png"}]}]}),
        ("/models/m:generateContent", {"contents": [{"parts": [
            {"inlineData": {"mimeType": "image/png", "data": "?"}}]}]}),
        ("/models/m:generateContent", {"contents": [{"parts": [
            {"inlineData": {"mimeType": "image/svg+xml", "data": "PHN2Zy8+"}}]}]}),
    ],
)  # fmt: skip
async def test_what_a_policy_cannot_see_is_refused(bench: Bench, path: str, body: Any) -> None:
    answer, calls, _ = await ask(bench, body, path=path)
    assert answer.status_code == 400
    assert "messages[0].content[0] that it cannot see" in answer.json()["error"]["message"]
    assert calls == []
    assert await stored(bench) == 0
