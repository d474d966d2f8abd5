"""A real vLLM child process: its mistakes, its death, and a whole run on it."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch

from agentrl.algorithms.chat_completions import ModelServer
from agentrl.algorithms.engines.vllm.server import VllmServer, vllm_server
from agentrl.algorithms.engines.vllm.weights import SharedMemorySync
from agentrl.algorithms.learners.auxiliary import Reference
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.teachers import RemoteTeacher
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import PolicyError
from agentrl.core.types import NewRollout, PolicyVersion, Purpose, Sampling, Transition
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.main import run_features
from agentrl.store import open_store
from agentrl.tiny.models import word_tokenizer
from tests.algorithms.engines.callers import UPDATES, always_called
from tests.algorithms.learners.test_learner import make_batch
from tests.algorithms.train.test_update import group
from tests.system.test_run import measured

psutil = pytest.importorskip("psutil")
pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: run `make test-engines`"
    ),
    pytest.mark.timeout(600),
]
CALLERS, LONG = 16, 400


def server_of(model_dir: Path, output: Path, **vllm: object) -> tuple[VllmServer, torch.nn.Module]:
    engine = {"kind": "vllm", "max_context": 512, "vllm": vllm}
    config = resolve({"output": str(output), "engine": engine}, source="test")
    model, tokenizer = load_model(model_dir, device="cpu")
    return vllm_server(config, model, tokenizer), model


def offspring() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


def workers() -> list[int]:
    """The processes that compute: those that the engine of a child has started. Their names do not
    tell, as they cannot always set them."""
    engines = [each for child in psutil.Process().children() for each in child.children()]
    started = [each for engine in engines for each in engine.children()]
    pids = [each.pid for each in started if "resource_tracker" not in " ".join(each.cmdline())]
    assert pids
    return pids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(
    wide_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[VllmServer, torch.nn.Module]]:
    before = set(offspring())
    output = tmp_path_factory.mktemp("run")
    server, model = server_of(wide_model_dir, output)
    await server.start()
    yield server, model
    await server.close()
    assert set(offspring()) <= before
    assert not Path(output, "vllm", "served").exists()


@torch.no_grad()
def disturb(model: torch.nn.Module) -> None:
    for weight in model.parameters():
        weight.add_(0.05 * torch.randn_like(weight))


async def version(server: VllmServer) -> str:
    body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 1}
    url = f"{server.base_url}/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
        assert reply.status == 200
        return reply.headers["x-policy-version"]


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_in_flight_when_it_dies_are_answered_after_all(
    started: tuple[VllmServer, torch.nn.Module], tmp_path: Path
) -> None:
    """Through the gateway, which asks again until the attempt's time is over. What of a stream has
    reached the agent cannot be taken back: its connection breaks, and the agent may ask again. The
    answers are of the version that was published last."""
    server, model = started
    disturb(model)
    await server.publish(1)
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": LONG,
        "ignore_eos": True,
    }

    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("crash", {})
        await store.publish(
            PolicyVersion("crash", "policy", 1, base_url=server.base_url, model=server.model)
        )
        sampling = Sampling(temperature=1.0, max_tokens=LONG)
        await store.enqueue(
            [
                NewRollout(
                    id=f"r{i}",
                    run="crash",
                    group=f"g{i}",
                    index=0,
                    task={"input": "x"},
                    sampling=sampling,
                    timeout=300.0,
                )
                for i in range(CALLERS)
            ]
        )
        attempts = await store.claim(CALLERS, runner="test", lease=600.0, run="crash")
        gateway = Gateway(store, "crash", features=run_features(store, RunConfig()))
        gateway.start()
        lives = [gateway.register(attempt) for attempt in attempts]
        async with aiohttp.ClientSession() as http:

            async def call(number: int, stream: bool) -> int:
                path = gateway.base_url.replace("/v1", f"/a/{attempts[number].id}/v1")
                chosen = body | {"stream": stream}
                async with http.post(f"{path}/chat/completions", json=chosen) as reply:
                    await reply.content.readany()
                    begun.add(number)
                    await reply.read()
                    return reply.status

            begun = set[int]()
            calls = [asyncio.create_task(call(i, stream=i % 2 == 1)) for i in range(CALLERS)]
            seen = 0
            while seen < CALLERS or len(begun) < CALLERS // 2:
                seen = await in_flight(http, server)
                assert not any(task.done() for task in calls), "a call was answered too early"
            killed = workers()
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert answers[::2] == [200] * (CALLERS // 2)
            for number in range(1, CALLERS, 2):
                assert isinstance(answers[number], aiohttp.ClientPayloadError)
                assert await call(number, stream=True) == 200
        for live in lives:
            await asyncio.wrap_future(gateway.unregister(live))
        await asyncio.to_thread(gateway.close)
        traces = [await store.trace(attempt.rollout.id) for attempt in attempts]
        transitions = [each for trace in traces for each in trace.transitions]
    assert not set(killed) & set(offspring())
    whole = [transition for transition in transitions if transition.finish == "length"]
    assert len(whole) == CALLERS
    for transition in whole:
        assert transition.version == 1
        assert transition.exact
        assert len(transition.completion) == len(transition.logprobs) == LONG


def asked(server: VllmServer) -> dict[str, Any]:
    prompt = {"model": server.model, "prompt": [5, 6, 7]}
    return prompt | {"logprobs": 0, "return_token_ids": True}


async def in_flight(http: aiohttp.ClientSession, server: VllmServer) -> int:
    """Calls that vLLM computes."""
    headers = {"x-agentrl-key": server.host.key}
    async with http.get(f"{server.host.url}/metrics", headers=headers) as reply:
        found = re.search(
            r"^vllm:num_requests_running{.*} (\S+)$", await reply.text(), re.MULTILINE
        )
    return int(float(found[1])) if found else 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_with_wrong_weights_answers_nobody(
    started: tuple[VllmServer, torch.nn.Module],
) -> None:
    server, model = started
    right, learned = server.delivery.parity, server.delivery.parity.learned
    wrong = replace(
        learned, score=lambda policy, tokens: [x - 0.5 for x in learned.score(policy, tokens)]
    )
    server.delivery.parity = replace(right, learned=wrong)
    with pytest.raises(PolicyError, match=r"version 3: log-prob -.* against -.*tolerance 0\.001"):
        await server.publish(3)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await version(server)
    server.delivery.parity = right
    await server.publish(4)
    assert await version(server) == "4"

    assert isinstance(server._weights._sync, SharedMemorySync)
    first = server._weights._sync._weights[0]
    name, first["name"] = first["name"], "nobody"  # what vLLM is to load is not there
    with pytest.raises(PolicyError, match=r"vLLM: /update_weights: 500 "):
        await server.publish(5)
    first["name"] = name
    disturb(model)
    await server.publish(6)
    assert await version(server) == "6"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_update_that_hangs_is_a_sentence_in_time(
    started: tuple[VllmServer, torch.nn.Module],
) -> None:
    server, _ = started
    before, server.delivery.timeout = server.delivery.timeout, 1.0
    stopped = workers()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(PolicyError, match="no answer within 1 s"):
            await server.publish(7)
        assert time.monotonic() - began < 10
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        server.delivery.timeout = before
    await server.publish(8)
    assert await version(server) == "8"


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_go_on_over_an_update_with_keys_of_the_new_weights(
    started: tuple[VllmServer, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, model = started
    newest = int(await version(server))
    policies = {newest: copy.deepcopy(model)}
    monkeypatch.setattr(server.delivery, "in_flight", True)
    async with always_called(f"{server.base_url}/completions", **asked(server)) as callers:
        while not callers.crossed and len(policies) <= UPDATES:
            await callers.more(1)
            disturb(model)
            newest += 1
            await server.publish(newest)
            assert await version(server) == str(newest)
            policies[newest] = copy.deepcopy(model)
            await callers.more(4)  # which may have begun before the update
    assert callers.crossed
    for answer in callers.answers:
        assert isinstance(answer, dict), answer
        (choice,) = answer["choices"]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        spans = choice.get("agentrl_spans") or [(0, answer["version"])]
        starts = [start for start, _ in spans]
        assert starts == sorted(set(starts))
        assert starts[0] == 0
        assert starts[-1] < len(tokens)
        row, named = torch.tensor([[5, 6, 7, *tokens]]), torch.empty(len(tokens))
        for start, of in spans:
            with torch.no_grad():
                known = policies[of](row).logits[0, 2:-1].log_softmax(-1)
            named[start:] = known.gather(1, torch.tensor(tokens)[:, None])[start:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), named, rtol=0, atol=1e-3)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_child_killed_before_resume_returns_with_the_update(
    started: tuple[VllmServer, torch.nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, model = started
    request, killed, newest = server.host.request, list[int](), int(await version(server)) + 1

    async def dies(method: str, path: str, body: Any = None, server: str = "") -> Any:
        if path.startswith("/resume") and not killed:
            killed.extend(workers())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return await request(method, path, body, server)

    monkeypatch.setattr(server.host, "request", dies)
    monkeypatch.setattr(server.delivery, "in_flight", True)
    async with always_called(f"{server.base_url}/completions", **asked(server)) as callers:
        await callers.more(1)
        disturb(model)
        await server.publish(newest)  # its log-probs are compared
    assert killed
    assert any(isinstance(answer, str) for answer in callers.answers)
    assert await version(server) == str(newest)
    assert "vLLM ended and is restarted with the newest weights" in caplog.text


@pytest.mark.asyncio(loop_scope="module")
async def test_a_teacher_on_vllm_gives_the_lessons_of_the_same_model(
    started: tuple[VllmServer, torch.nn.Module], wide_model_dir: Path
) -> None:
    server, model = started
    policy, tokenizer = load_model(wide_model_dir, device="cpu")
    torch.manual_seed(5)
    disturb(policy)
    other, frozen = copy.deepcopy(policy), Reference(copy.deepcopy(model), policy)
    local = TorchLearner(policy, tokenizer, frozen={"teacher": frozen})
    endpoint = ModelServer(server.base_url, server.model, "")
    teacher = RemoteTeacher("teacher.model = 'it'", endpoint, 12, tokenizer, 512)
    await teacher.check()

    batch = make_batch()
    ids, logprobs = await asyncio.to_thread(teacher.top, batch)
    wanted, expected = local.top(batch, 12, "teacher")
    assert torch.equal(ids[:, 0], wanted[:, 0])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
    named = local.topk_logprobs(replace(batch, topk_tokens=ids), "teacher")
    torch.testing.assert_close(logprobs, named, rtol=0, atol=1e-3)

    algo = make("grpo+distill", {"distill_top": 12}, supplies=local.supplies)
    config = resolve({"algorithm": {"lr": 1e-3}}, source="test")
    groups = [group("a", 1.0, 0.0), group("b", 0.0, 1.0)]
    here = Updater(config, algo, local)
    there = Updater(config, algo, TorchLearner(other, tokenizer), teacher=teacher)
    found, same = [await asyncio.to_thread(each.update, 0, groups) for each in (there, here)]
    assert found["loss"] == pytest.approx(same["loss"], rel=1e-3)
    assert found["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-3)

    with pytest.raises(PolicyError, match=r"400: .* max allowed: 20.* --max-logprobs 21 or more"):
        await replace(teacher, k=21).check()
    with pytest.raises(PolicyError, match=r"404: .*does not exist"):
        await replace(teacher, endpoint=endpoint._replace(model="nobody")).check()
    small = word_tokenizer(["one", "two"])
    with pytest.raises(PolicyError, match=r"token \d+ is '.*' there and '.*' here, so it cannot"):
        await replace(teacher, tokenizer=small).check()
    large = word_tokenizer([f"w{number}" for number in range(600)])
    with pytest.raises(PolicyError, match=r"400: .*out of vocabulary"):
        await replace(teacher, tokenizer=large).check()


@pytest.mark.asyncio(loop_scope="module")
async def test_what_vllm_cannot_run_is_a_sentence(
    tiny_model_dir: Path, wide_model_dir: Path, tmp_path: Path
) -> None:
    """Heads of 16 have no kernel in its attention, which it notices at the first call only."""
    before = set(offspring())
    narrow, _ = server_of(tiny_model_dir, tmp_path / "narrow")
    three, _ = server_of(
        wide_model_dir, tmp_path / "three", arguments=["--tensor-parallel-size", "3"]
    )
    unknown, _ = server_of(wide_model_dir, tmp_path / "unknown")
    learned = unknown._weights._learned

    def save(directory: Path) -> None:
        learned.save(directory)
        file = directory / "config.json"
        text = json.loads(file.read_text())
        file.write_text(json.dumps(text | {"architectures": ["Nobody"], "model_type": "nobody"}))

    unknown._weights._learned = replace(learned, save=save)
    told = await asyncio.gather(
        *(server.start() for server in (narrow, three, unknown)), return_exceptions=True
    )
    assert all(isinstance(error, PolicyError) for error in told), told
    sentences = [str(error) for error in told]
    assert "failed at its first call; it said: " in sentences[0]
    assert "head_dim=16" in sentences[0]
    assert "divisible by tensor parallel size" in sentences[1]
    assert "nobody" in sentences[2]
    assert not any("\n" in sentence for sentence in sentences)
    assert set(offspring()) <= before


def train(folder: Path, *overrides: str) -> None:
    trained = subprocess.run(
        [sys.executable, "-m", "agentrl", "train", "run.toml", *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr


async def untrained_calls(store: Path) -> dict[tuple[int, int], Transition]:
    """The model's calls in the greedy evaluation before the first step, by rollout and number."""
    async with open_store(f"sqlite:///{store}") as opened:
        rollouts = await opened.rollouts("tiny", purpose=Purpose.EVAL, step=0)
        traces = [(rollout.index, await opened.trace(rollout.id)) for rollout in rollouts]
    return {
        (index, call.index): call
        for index, trace in traces
        if trace is not None
        for call in trace.transitions
        if call.sampling.temperature == 0
    }


def test_a_langchain_agent_is_trained_with_grpo_on_vllm(
    run_folder: Path, wide_model_dir: Path
) -> None:
    """Log-probs of sampler and learner agree at every step, which nothing but exact tokens and the
    newest weights can do. Before the first, they are those of a run with the embedded server from
    the same seed and weights."""
    same = ["engine.max_context=512", f"policy.model={wide_model_dir}"]
    small = ["steps=3", "algorithm.groups=2", "algorithm.group_size=4"]
    train(run_folder, *same, *small, "engine.kind=vllm")
    train(run_folder, *same, "steps=0", "output=embedded")
    served, embedded = (
        asyncio.run(untrained_calls(run_folder / output / "store.db"))
        for output in ("out", "embedded")
    )
    assert len(served) >= 4
    assert served.keys() == embedded.keys()
    for key, call in served.items():
        assert list(call.prompt) == list(embedded[key].prompt)
        assert list(call.completion) == list(embedded[key].completion)
        np.testing.assert_allclose(call.logprobs, embedded[key].logprobs, rtol=0, atol=1e-4)

    steps = measured(run_folder)
    assert len(steps) == 3
    for step in steps:
        assert step["rollouts"] == 8
        assert step["update/skipped"] == 0
        assert step["logprob_difference/max"] <= 1e-4
