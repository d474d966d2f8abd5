"""Whole runs of an agent that looks: gateway, store, engine and learner."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.core.types import Image, Rollout, StepRow, Transition
from agentrl.store import open_store
from tests import factories, warm

RUN = """\
name = "look"
steps = 2
audit.before = false

[algorithm]
groups = 2
group_size = 4

[engine]
max_context = 256

[sampling]
max_tokens = 6
"""
MODEL = """\
from agentrl.tiny import vision as tiny

def build(directory, seed):
    words = "look what is this see red".split()
    tiny.save(*tiny.make("KIND", words, seed=seed, hidden=WIDTH), directory)
"""
AGENT = """\
import base64, io, random
from openai import AsyncOpenAI
from PIL import Image

def picture(seed):
    colour = tuple(random.Random(seed).randbytes(3))
    file = io.BytesIO()
    Image.new("RGB", (30, 40), colour).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}

async def agent(seed):
    async with AsyncOpenAI() as client:
        messages = [{"role": "user", "content": [picture(seed), {"type": "text", "text": "what"}]}]
        for turn in range(2):
            answer = await client.chat.completions.create(model="m", messages=messages)
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}]
            messages += [{"role": "user", "content": [picture(seed + 100)]}]
        return said
"""
VERIFIER = "def verify(task, result): return len(result or '') % 5 / 4\n"


def run_folder(folder: Path, kind: str, vision: str, width: int = 64) -> Path:
    tasks = "".join(f'{{"input": {n}}}\n' for n in range(4))
    factories.run_folder(folder, AGENT, VERIFIER, tasks, RUN)
    file = folder / "run.toml"
    policy = f'build = "model.py:build"\nvision = "{vision}"'
    file.write_text(file.read_text().replace('model = "model"', policy))
    (folder / "model.py").write_text(MODEL.replace("KIND", kind).replace("WIDTH", str(width)))
    return folder


@dataclass(frozen=True)
class Stored:
    steps: list[StepRow]
    rollouts: list[Rollout]
    calls: list[Transition]
    images: dict[str, Image]


def stored(folder: Path) -> Stored:
    async def read() -> Stored:
        async with open_store(f"sqlite:///{folder}/runs/look/store.db") as store:
            steps = [row for row in await store.steps("look") if row.committed]
            rollouts = await store.rollouts("look")
            found = await store.calls([row.id for row in rollouts])
            calls = [call for some in found.values() for call in some]
            names = sorted({digest for call in calls for digest in call.images})
            return Stored(steps, rollouts, calls, await store.images("look", names))

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("kind", "vision"), [("qwen3_vl", "trained"), ("llava", "frozen")], ids=lambda x: x
)
def test_an_agent_that_looks_is_trained(kind: str, vision: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, kind, vision)
    for steps in ("2", "3"):  # the second goes on from the checkpoint, with its tower
        done = warm.run("-m", "agentrl", "train", "run.toml", f"steps={steps}", cwd=folder)
        assert done.returncode == 0, done.stderr
    found = stored(folder)
    assert [row.step for row in found.steps] == [0, 1, 2]
    for row in found.steps:
        assert row.metrics["logprob_difference/max"] <= 2e-6
        assert row.metrics["calls/images_unread"] == 0
        assert row.metrics["images/distinct"] == 4
    assert {len(call.images) for call in found.calls} == {1, 2}
    assert all(call.exact for call in found.calls)
    assert {digest for call in found.calls for digest in call.images} == found.images.keys()


def test_without_the_setting_a_call_with_an_image_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "llava", "")
    done = warm.run("-m", "agentrl", "train", "run.toml", cwd=folder)
    assert done.returncode != 0
    failures = [row.failure for row in stored(folder).rollouts]
    assert failures
    assert all(failure and "training would not see" in failure.message for failure in failures)
    assert all(failure and "policy.vision" in failure.message for failure in failures)
