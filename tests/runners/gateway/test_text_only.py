"""A policy is trained on text: what is not text reaches frozen endpoints only."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from agentrl.core.config import RunConfig, UpstreamConfig
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import run_features

URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
BLOCK = {"type": "image", "source": SOURCE}
USER = {"role": "user", "content": "q"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
USE = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
}
ITEM = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


def chat(*parts: Any, role: str = "user") -> tuple[str, dict[str, Any]]:
    return "/chat/completions", {"messages": [USER, {"role": role, "content": [*parts]}]}


def messages(*turns: Any) -> tuple[str, dict[str, Any]]:
    return "/messages", {"max_tokens": 5, "messages": [USER, *turns]}


RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [BLOCK], "is_error": True}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
PICTURE = {"type": "input_image", "image_url": URL}
SCREENSHOT = {"type": "computer_screenshot", "image_url": URL}
INLINE = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}


def google(*contents: Any) -> tuple[tuple[str, dict[str, Any]], str]:
    return ("/models/MODEL:generateContent", {"contents": [*contents]}), "image_url"


CALLS = [
    (chat(IMAGE), "image_url"),
    (chat({"type": "text", "text": "see"}, IMAGE, role="system"), "image_url"),
    (("/chat/completions", {"messages": [USER, CALLED, {"role": "tool", "tool_call_id": "c",
                                                        "content": [IMAGE]}]}), "image_url"),
    (chat({"image_url": {"url": URL}, "uuid": "1"}), "image_url"),
    (chat({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}), "input_audio"),
    (chat({"type": "video_url", "video_url": {"url": URL}}), "video_url"),
    (chat({"type": "file", "file": {"file_data": "data:application/pdf;base64,AA"}}), "file"),
    (("/chat/completions", {"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}, USER]}),
     "audio"),
    (("/completions", {"prompt": "", "prompt_embeds": "AAAA"}), "prompt_embeds"),
    (("/chat/completions", {"messages": [USER | {"images": ["AAAA"]}]}), "images"),
    (("/chat/completions", {"messages": [USER], "images": ["AAAA"]}), "images"),
    (("/completions", {"prompt": "q", "multi_modal_data": {"image": URL}}), "multi_modal_data"),
    (messages({"role": "user", "content": [BLOCK]}), "image_url"),
    (messages(USE, {"role": "user", "content": [RESULT]}), "image_url"),
    (("/responses", {"input": [{"role": "user", "content": [PICTURE]}]}), "image_url"),
    (("/responses", {"input": [USER, ITEM, OUTPUT | {"output": [PICTURE]}]}), "image_url"),
    (("/responses", {"input": [USER, ITEM, {"type": "computer_call_output", "call_id": "c",
                                            "output": SCREENSHOT}]}), "image_url"),
    google({"role": "user", "parts": [{"text": "see"}, INLINE]}),
    google({"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
           {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"x": 1},
                                                            "parts": [INLINE]}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "kind"), CALLS)
async def test_it_is_refused_by_a_policy_and_fails_the_rollout(
    bench: Any, sent: tuple[str, dict[str, Any]], kind: str
) -> None:
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        answer = await http.post(sent[0].replace("MODEL", "m"), json={"model": "m"} | sent[1])
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert f"'policy' is trained on text, and this call has {kind}" in said
    assert "[upstreams]" in said
    assert [*active.failures.values()] == [said]
    assert bench.model.requests == []


@pytest.mark.parametrize(("sent", "kind"), CALLS)
async def test_a_frozen_endpoint_gets_it(
    bench: Any, sent: tuple[str, dict[str, Any]], kind: str
) -> None:
    upstreams = {"eyes": UpstreamConfig(base_url=bench.model.base_url, model="m")}
    features = run_features(bench.store, RunConfig())
    gateway = Gateway(bench.store, "test", upstreams=upstreams, features=features)
    gateway.start()
    try:
        active = gateway.register(await bench.attempt())
        headers = {"authorization": f"Bearer {active.key}"}
        async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers) as http:
            path = sent[0].replace("MODEL", "eyes")
            answer = await http.post(path, json={"model": "eyes"} | sent[1])
        assert answer.status_code == 200, answer.text
    finally:
        await asyncio.to_thread(gateway.close)
    (asked,) = bench.model.requests
    assert kind in str(asked)
    assert kind != "image_url" or URL in str(asked)


async def test_a_failed_look_says_so_beside_its_image(bench: Any) -> None:
    from agentrl.runners.apis.chat import ConversationMemory
    from agentrl.runners.apis.messages import chat_request

    _, body = messages(USE, {"role": "user", "content": [RESULT]})
    *_, result = chat_request(body, ConversationMemory())["messages"]
    assert result["content"] == [{"type": "text", "text": "Error: "}, IMAGE]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [
            {"type": "document", "source": SOURCE}]}]}),
        ("/responses", {"input": [{"role": "user", "content": [
            {"type": "input_file", "file_data": "AA"}]}]}),
        ("/responses", {"input": [{"type": "computer_call_output", "call_id": "c",
                                   "output": SCREENSHOT | {"image_url": None, "file_id": "x"}}]}),
        ("/models/m:generateContent", {"contents": [{"parts": [
            {"inlineData": {"mimeType": "video/mp4", "data": "AA"}}]}]}),
        ("/models/m:generateContent", {"contents": [{"role": "model", "parts": [
            {"inlineData": {"mimeType": "image/png", "data": "AA"}}]}]}),
        ("/models/m:generateContent", {"contents": [{"parts": [
            {"fileData": {"mimeType": "application/pdf", "fileUri": "x"}}]}]}),
        ("/models/m:generateContent", {"contents": [{"parts": [
            {"functionResponse": {"name": "f", "response": {}, "parts": [
                {"inlineData": {"mimeType": "audio/wav", "data": "AA"}}]}}]}]}),
    ],
)  # fmt: skip
async def test_what_no_chat_completion_can_say_is_refused_by_its_dialect(
    bench: Any, path: str, body: dict[str, Any]
) -> None:
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        answer = await http.post(path, json={"model": "m"} | body)
    assert answer.status_code == 400
    assert "not possible" in answer.json()["error"]["message"]


async def test_parts_that_are_text_are_text(bench: Any) -> None:
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, "c", {"type": "refusal", "refusal": "d"}]
    path, body = chat(*parts)
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        answer = await http.post(path, json={"model": "m"} | body)
    assert answer.status_code == 200


async def test_an_empty_field_is_text(bench: Any) -> None:
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    body = {"messages": [USER | {"images": []}], "images": [], "prompt_embeds": None}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        answer = await http.post("/chat/completions", json={"model": "m"} | body)
    assert answer.status_code == 200, answer.text
