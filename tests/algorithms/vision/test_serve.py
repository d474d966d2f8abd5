"""`agentrl serve` of a policy that looks, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import anthropic
import openai
import pytest

from agentrl.tiny import vision
from tests.agentrl.models import trained
from tests.agentrl.models.banner import read_banner
from tests.algorithms.vision.looks import WORDS, png
from tests.algorithms.vision.on_vllm import WIDE
from tests.algorithms.vision.test_serving import image, text, user

NEEDS_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: run `make test-engines`"
)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=NEEDS_VLLM)])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(request.param)
    vision.save(*vision.make("llava", WORDS, hidden=WIDE), folder / "model")
    trained.make(folder, folder / "model", vision="frozen")
    command = [sys.executable, "-m", "agentrl", "serve", "mine", "--port", "0"]
    command += ["--engine", request.param, "engine.max_context=512"]
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        url, _ = read_banner(process)
        yield url
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert (process.wait(timeout=60), rest) == (0, "Stopped.\n")


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


def test_an_image_is_looked_at_and_nothing_of_it_is_kept(client: openai.OpenAI) -> None:
    def ask(*parts: Any) -> Any:
        return client.chat.completions.create(
            model="m", messages=[user(*parts)], max_tokens=5, temperature=0
        )  # fmt: skip

    words, seen = ask(text("look")), ask(text("look "), image(png(1)))
    size = 4  # placeholders of an image
    assert seen.usage.prompt_tokens == words.usage.prompt_tokens + size
    again = ask(text("look "), image(png(1)))
    assert again.choices[0].message.content == seen.choices[0].message.content


def test_an_image_in_a_tool_result_of_anthropic_is_looked_at(url: str) -> None:
    shown = {"type": "base64", "media_type": "image/png"}
    shown["data"] = image(png(2))["image_url"]["url"].partition(",")[2]
    messages: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "see", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t",
             "content": [{"type": "image", "source": shown}]}]},
    ]  # fmt: skip
    root = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key="x", max_retries=0) as client:
        answer = client.messages.create(model="m", max_tokens=5, messages=messages)
    assert answer.usage.output_tokens in range(1, 6)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([image(png(n)) for n in range(200)], r"200 images, more than 100"),
        ([image(b"<svg/>")], "SVG"),
    ],
)
def test_what_it_cannot_see_is_a_sentence(
    client: openai.OpenAI, parts: list[Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="m", messages=[user(*parts)], max_tokens=2)
