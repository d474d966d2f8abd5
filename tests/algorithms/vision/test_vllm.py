"""A real vLLM child of policies that look, over HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentrl.core.errors import PolicyError
from tests.algorithms.vision.looks import eyes_of, png
from tests.algorithms.vision.on_vllm import WAYS, WIDE, Served, serving
from tests.algorithms.vision.test_run import run_folder, stored
from tests.algorithms.vision.test_serving import image, text, user

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: run `make test-engines`"
    ),
    pytest.mark.timeout(600),
]
CLOSE = 1e-5  # nats


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    async with serving(request.param, tmp_path_factory.mktemp(request.param)) as served:
        yield served


@pytest.mark.asyncio(loop_scope="module")
async def test_answers_have_the_log_probs_of_the_learner(served: Served) -> None:
    for _ in range(3):
        gaps = await served.gaps()
        assert len(gaps) >= 2
        assert max(gaps) <= CLOSE
        await served.change()


@pytest.mark.asyncio(loop_scope="module")
async def test_other_pixels_are_a_sentence_before_the_first_step(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sees another picture than the learner, whose prompt may be longer too."""
    eyes, probe = eyes_of(served.model), eyes_of(served.model).probe()
    read, other = eyes.read, [user(text("What is this? "), image(png(3)))]
    monkeypatch.setattr(eyes, "probe", lambda: other)
    monkeypatch.setattr(eyes, "read", lambda prompt, messages: read(prompt, probe))
    with pytest.raises(PolicyError, match=r"preprocessor_config\.json.*mm.processor.kwargs"):
        await served.change()
    monkeypatch.undo()
    await served.change()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "video"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio"),
        (image(png(1)[:60]), "image"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_it_cannot_see_is_an_error_of_one_call(
    served: Served, part: dict[str, Any], words: str
) -> None:
    body = {"model": served.server.model, "messages": [user(part)], "max_tokens": 2}
    response = await served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
    await served.gaps(2)  # it goes on answering


def test_an_agent_that_looks_is_trained_on_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "llava", "trained", WIDE)
    command = [sys.executable, "-m", "agentrl", "train", "run.toml", "engine.kind=vllm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = stored(folder)
    assert [row.step for row in found.steps] == [0, 1]
    for row in found.steps:
        assert row.metrics["logprob_difference/max"] <= CLOSE
        assert row.metrics["calls/images_unread"] == 0
        assert row.metrics["images/distinct"] == 4
    assert all(call.exact for call in found.calls)
    assert {digest for call in found.calls for digest in call.images} == found.images.keys()
