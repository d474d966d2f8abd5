"""The embedded server of an image-text policy, over HTTP."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.core.types import Sampling, Transition, int32
from agentrl.tiny import vision
from tests.algorithms.vision.looks import KINDS, WORDS, digest, eyes_of, own_logprobs, png

CLOSE = 1e-5  # nats; float32, whose last bits depend on a batch's shape and on the processor


def image(body: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(body).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@asynccontextmanager
async def serving(kind: str, **options: Any) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    model, tokenizer = vision.make(kind, WORDS, most=28 * 56, trained=True)  # type: ignore[arg-type]
    server = EmbeddedServer(
        model, tokenizer, max_batch=16, max_context=512, threads=1,
        defaults=Sampling(max_tokens=6), **options,
    )  # fmt: skip
    await server.start()
    address = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=address, timeout=60) as http:
        server.network = model  # type: ignore[attr-defined]
        yield server, http
    await server.close()


async def ask(http: httpx.AsyncClient, messages: list[Any], **body: Any) -> dict[str, Any]:
    request = {"messages": messages, "logprobs": True, "return_token_ids": True, **body}
    response = await http.post("/v1/chat/completions", json=request)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def call_of(answer: dict[str, Any], images: Sequence[bytes]) -> tuple[Transition, list[float]]:
    (choice,) = answer["choices"]
    call = Transition(
        id="c", attempt="a", index=0, prompt=int32(answer["prompt_token_ids"]),
        completion=int32(choice["token_ids"]), logprobs=(), images=tuple(map(digest, images)),
    )  # fmt: skip
    return call, [entry["logprob"] for entry in choice["logprobs"]["content"]]


def gap(model: Any, answer: dict[str, Any], images: Sequence[bytes]) -> float:
    """The largest difference of an answer's log-probs to those of the class's own forward pass."""
    call, found = call_of(answer, images)
    with torch.no_grad():
        own = own_logprobs(model, call)
    return float((torch.tensor(found) - own).abs().max())


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_have_the_log_probs_of_a_class_with_pixel_values(kind: str) -> None:
    """Sixteen calls at once, whose prompts differ only in their image; then a second image each."""
    async with serving(kind) as (server, http):

        async def talk(number: int) -> list[tuple[dict[str, Any], list[bytes]]]:
            first, second = png(number, 60, 30), png(50 + number, 30 + number, 40)
            messages: list[Any] = [user(text("look "), image(first), text("what is this"))]
            one = await ask(http, messages, seed=number)
            said = one["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": said}, {"role": "user", "content": "see a"},
                user(image(second)),
            ]  # fmt: skip
            two = await ask(http, messages, seed=number)
            return [(one, [first]), (two, [first, second])]

        talks = await asyncio.gather(*(talk(number) for number in range(16)))
        assert len({tuple(talk[0][0]["prompt_token_ids"]) for talk in talks}) == 1
        model = server.network
        image_id = model.config.image_token_id
        checked = 0
        for answer, images in (call for talk in talks for call in talk):
            # The class counts placeholders by their id, so it refuses a sampled one.
            sizes = sum(eyes_of(model).catalogue.add(body).size for body in images)
            ids = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
            if ids.count(image_id) == sizes:
                checked += 1
                assert gap(model, answer, images) <= CLOSE
        assert checked >= 16


async def test_a_prompt_shares_cached_keys_only_up_to_another_image() -> None:
    async with serving("qwen2_5_vl") as (server, http):
        messages = [user(text("look see "), image(png(1)), text("what"))]
        await ask(http, messages, max_tokens=1)
        rows, chat = server._admission.engine.rows, server._chat

        def prompt(body: bytes) -> Any:
            eyes_of(server.network).catalogue.add(body)
            return chat.encode([user(text("look see "), image(body), text("what"))])

        same, other = prompt(png(1)), prompt(png(2))
        assert tuple(same) == tuple(other)
        place = same.index(server.network.config.image_token_id)
        assert rows.shared(same.read, 0).max() == len(same)
        assert rows.shared(other.read, 0).max() == place


async def test_an_update_encodes_images_with_the_new_tower() -> None:
    async with serving("llava", in_flight=True) as (server, http):
        messages = [user(image(png(3)), text("what"))]
        before = await ask(http, messages, temperature=0)
        model = server.network
        with torch.no_grad():
            for weight in model.model.vision_tower.parameters():
                weight.mul_(1.5)
        again = await ask(http, messages, temperature=0)
        assert call_of(again, [png(3)])[1] == pytest.approx(call_of(before, [png(3)])[1], abs=CLOSE)
        await server.publish(1)
        after = await ask(http, messages, temperature=0)
        assert call_of(after, [png(3)])[1] != pytest.approx(call_of(before, [png(3)])[1], abs=1e-3)
        assert gap(model, after, [png(3)]) <= CLOSE


@pytest.mark.parametrize("in_flight", [False, True])
async def test_an_adapter_looks_too(in_flight: bool) -> None:
    model, tokenizer = vision.make("qwen3_vl", WORDS, seed=1)
    adapters = LoraAdapters(model)
    adapters.add("policy", rank=2, alpha=4, seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in adapters.parameters("policy").values():
            weight.normal_(std=0.1)
    server = EmbeddedServer(
        model, tokenizer, adapters=adapters, threads=1, max_context=256, in_flight=in_flight
    )
    await server.start()
    async with httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1"), timeout=60) as http:
        messages = [user(image(png(4)), text("what"))]
        answer = await ask(http, messages, model="policy", max_tokens=4, temperature=0)
    await server.close()
    with adapters.using("policy"):
        assert gap(model, answer, [png(4)]) <= CLOSE
    with adapters.using(None):
        assert gap(model, answer, [png(4)]) > 1e-3


async def test_a_placeholder_in_a_text_is_text() -> None:
    async with serving("qwen2_5_vl") as (server, http):
        messages = [user(text("look <image> see "), image(png(5)), text("<image>"))]
        answer = await ask(http, messages, max_tokens=2)
        image_id, prompt = server.network.config.image_token_id, answer["prompt_token_ids"]
        size = eyes_of(server.network).catalogue.add(png(5)).size
        assert prompt.count(image_id) == size + 2
        read = server._chat.encode(messages).read
        at = [place for place, token in enumerate(read) if token == image_id]
        assert at == [prompt.index(image_id), len(prompt) - 2]
        assert (np.array(read) < 0).sum() == size


async def test_images_of_the_store_are_fetched_by_digest() -> None:
    asked: list[list[str]] = []
    kept = {digest(png(6006)): png(6006)}

    async def source(digests: Sequence[str]) -> Mapping[str, bytes]:
        asked.append(list(digests))
        return {name: kept[name] for name in digests if name in kept}

    async with serving("llava") as (server, http):
        eyes_of(server.network).source = source
        named = {"type": "image_url", "image_url": {"url": f"image:{digest(png(6006))}"}}
        by_digest, by_value = [
            call_of(await ask(http, [user(part, text("what"))], temperature=0), [png(6006)])
            for part in (named, image(png(6006)))
        ]
        assert list(by_digest[0].completion) == list(by_value[0].completion)
        assert by_digest[1] == pytest.approx(by_value[1], abs=CLOSE)
        assert asked == [[digest(png(6006))]]
        lost = {"type": "image_url", "image_url": {"url": f"image:{digest(b'lost')}"}}
        response = await http.post("/v1/chat/completions", json={"messages": [user(lost)]})
        assert response.status_code == 400
        assert "not in the store" in response.json()["error"]["message"]


UNSEEN = [
    ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "not fetched"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,raw"}}, "not base64"),
    ({"type": "image_url"}, "not fetched"),
    (image(png(1)[:60]), "cannot be read"),
    (image(b"<svg/>"), "cannot be read"),
    ({"type": "input_audio", "input_audio": {"data": ""}}, "text and images"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}, "text and"),
]


async def test_what_cannot_be_seen_is_refused() -> None:
    async with serving("llava") as (_, http):
        for part, words in UNSEEN:
            response = await http.post("/v1/chat/completions", json={"messages": [user(part)]})
            assert response.status_code == 400, part
            assert words in response.json()["error"]["message"], part
            assert (await ask(http, [user(text("look"))]))["choices"], part


async def test_without_the_setting_an_image_is_refused() -> None:
    model, tokenizer = vision.make("llava", WORDS)
    eyes_of(model).sees = False
    server = EmbeddedServer(model, tokenizer, threads=1, defaults=Sampling(max_tokens=2))
    await server.start()
    async with httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1")) as http:
        messages = [user(image(png(1)), text("what"))]
        response = await http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 400
        assert "a part that is not text" in response.json()["error"]["message"]
        assert (await ask(http, [user(text("look"))]))["choices"]
    await server.close()


async def test_a_template_that_drops_an_image_is_refused() -> None:
    async with serving("llava") as (server, http):
        template = vision.TEMPLATE.replace("<image>", "")
        server._chat._tokenizer.chat_template = template
        messages = [user(image(png(1)), text("what"))]
        response = await http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 400
        assert "renders 0 of the request's 1 images" in response.json()["error"]["message"]
