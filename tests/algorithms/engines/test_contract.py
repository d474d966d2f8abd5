"""What every policy server must do, over real HTTP: the embedded one, and vLLM if installed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch

from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.engines.vllm import server as factory
from agentrl.algorithms.model.load import Adapters, load_model
from agentrl.algorithms.train.serving import policy_server
from agentrl.core.config import resolve
from agentrl.core.errors import PolicyError
from agentrl.core.types import POLICY
from tests.algorithms.engines.callers import UPDATES, always_called

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "query", "parameters": {"type": "object"}}}]
NEEDS_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: run `make test-engines`"
)
KINDS = ["embedded", *(pytest.param(k, marks=NEEDS_VLLM) for k in ("vllm", "adapter", "url"))]
PUBLISHES = {"embedded": 10, "vllm": 50, "adapter": 10, "url": 10}  # under load


@dataclass(frozen=True)
class Answer:
    version: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Served:
    """A started server, what it serves, and a client of it."""

    server: PolicyServer
    model: Any
    tokenizer: Any
    http: aiohttp.ClientSession
    adapters: Adapters | None = None
    publishes: int = 0
    version: int = 0
    first: list[torch.Tensor] = field(init=False)  # the weights it began with

    def __post_init__(self) -> None:
        self.first = [weight.detach().clone() for weight in self.trained]

    @property
    def trained(self) -> list[torch.Tensor]:
        if self.adapters is None:
            return list(self.model.parameters())
        return list(self.adapters.parameters(POLICY).values())

    def using(self) -> AbstractContextManager[None]:
        """Forward passes within are those of the policy."""
        return nullcontext() if self.adapters is None else self.adapters.using(POLICY)

    def post(self, **body: Any) -> Any:
        chosen = {
            "model": self.server.model,
            "messages": HELLO,
            "max_tokens": 6,
            "temperature": 1.0,
        }
        added = {"logprobs": True, "return_token_ids": True}
        return self.http.post(
            f"{self.server.base_url}/chat/completions", json=chosen | added | body
        )

    async def ask(self, **body: Any) -> Answer:
        async with self.post(**body) as reply:
            assert reply.status == 200, await reply.text()
            answer = await reply.json()
            version = int(reply.headers["x-policy-version"])
        choice = answer["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return Answer(version, answer["prompt_token_ids"], choice["token_ids"], logprobs)

    @torch.no_grad()
    def disturb(self) -> None:
        # Each time from the first ones: after many steps at random, weights and with them numerical
        # errors would be as large as no training makes them.
        for weight, first in zip(self.trained, self.first, strict=True):
            weight.copy_(first + 0.05 * torch.randn_like(weight))

    @torch.no_grad()
    def logprobs(self, answer: Answer, temperature: float = 1.0) -> torch.Tensor:
        """The model's own log-probs of an answer's tokens."""
        with self.using():
            logits = self.model(torch.tensor([answer.prompt + answer.tokens])).logits[0]
        logprobs = (logits / temperature).log_softmax(-1)[len(answer.prompt) - 1 : -1]
        return logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]

    def gap(self, answer: Answer, temperature: float = 1.0) -> float:
        """Largest difference of the answer's log-probs from the model's."""
        ours = self.logprobs(answer, temperature)
        return float((ours - torch.tensor(answer.logprobs)).abs().max())

    async def change(self) -> None:
        """Other weights, as the next version."""
        async with self.server.updating():
            self.disturb()
            await self.server.publish(self.version + 1)
        self.version += 1


@contextmanager
def vllm_of_somebody_else(model_dir: Path, log: Path) -> Iterator[str]:
    """The URL of `vllm serve`, as its documentation says to start it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "512", "--served-model-name", "theirs", "--enforce-eager"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--worker-extension-cls", "agentrl.algorithms.engines.vllm.worker_extension.Extension"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--middleware", "agentrl.algorithms.engines.vllm.protocol.SpanMiddleware"),
    ]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def served(
    request: pytest.FixtureRequest, wide_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    output = tmp_path_factory.mktemp("run")
    engine: dict[str, Any] = {"kind": "vllm", "max_context": 512}
    with ExitStack() as stack:
        if request.param == "embedded":
            engine["kind"] = "embedded"
        elif request.param == "url":
            url = stack.enter_context(vllm_of_somebody_else(wide_model_dir, output / "theirs.log"))
            engine["vllm"] = {"urls": [url]}
        model, tokenizer = load_model(wide_model_dir, device="cpu")
        adapters = None
        if request.param == "adapter":
            from agentrl.algorithms.model.lora import LoraAdapters

            adapters = LoraAdapters(model)
            adapters.add(POLICY, rank=4, alpha=8.0)
            adapters.add("other", rank=2, alpha=8.0)
            patched = stack.enter_context(pytest.MonkeyPatch.context())
            patched.setattr(factory, "MIN_ADAPTERS", 3)
        config = resolve({"output": str(output), "engine": engine}, source="test")
        server = policy_server(config, model, tokenizer, adapters)
        await server.start()
        async with aiohttp.ClientSession() as http:
            yield Served(server, model, tokenizer, http, adapters, PUBLISHES[request.param])
        await server.close()
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http:
                await http.get(f"{server.base_url}/models")
        await server.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
async def test_an_answer_has_its_tokens_and_log_probs(served: Served, temperature: float) -> None:
    answer = await served.ask(temperature=temperature)
    prompt = served.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    assert answer.prompt == prompt
    assert 1 <= len(answer.tokens) <= 6
    assert served.gap(answer, temperature or 1.0) < 1e-4


async def test_a_stream_has_the_same_fields(served: Served) -> None:
    async with served.post(stream=True, temperature=0.0) as reply:
        version = reply.headers["x-policy-version"]
        lines = (await reply.read()).splitlines()
    data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
    chunks = [json.loads(line) for line in data]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    whole = await served.ask(temperature=0.0)
    prompt = next(ids for chunk in chunks if (ids := chunk.get("prompt_token_ids")))
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    logprobs = [
        entry["logprob"]
        for choice in choices
        for entry in (choice.get("logprobs") or {}).get("content") or ()
    ]
    assert (int(version), prompt, tokens) == (whole.version, whole.prompt, whole.tokens)
    assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_tools_are_part_of_the_prompt(served: Served) -> None:
    answer = await served.ask(tools=TOOLS)
    assert '"name": "query"' in served.tokenizer.decode(answer.prompt)


async def test_several_choices_and_a_limit(served: Served) -> None:
    async with served.post(n=3, max_tokens=2) as reply:
        choices = (await reply.json())["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert all(1 <= len(choice["token_ids"]) <= 2 for choice in choices)


async def test_what_cannot_be_read_is_the_callers_mistake(served: Served) -> None:
    async with served.post(messages="hello") as reply:
        assert reply.status in (400, 422)
    async with served.post(max_tokens=-1) as reply:
        assert reply.status in (400, 422)


async def test_a_published_version_is_the_learners_weights(served: Served) -> None:
    before = await served.ask(temperature=0.0)
    await served.change()
    after = await served.ask(temperature=0.0)
    assert (before.version, after.version) == (served.version - 1, served.version)
    assert served.gap(after) < 1e-4
    assert served.gap(before) > 1e-2


async def test_calls_wait_while_weights_may_change(served: Served) -> None:
    async with served.server.updating():
        call = asyncio.create_task(served.ask())
        served.disturb()
        await served.server.publish(served.version + 1)
        served.version += 1
        assert not call.done()
    answer = await call
    assert answer.version == served.version
    assert served.gap(answer) < 1e-4


async def test_publishes_under_load_lose_no_call_and_mix_no_versions(served: Served) -> None:
    """32 callers at a time. Calls are held while weights change, so that no version changes within
    one: the log-probs of all its tokens are of the version that the answer names."""
    weights = {served.version: [weight.detach().clone() for weight in served.trained]}
    answers: list[Answer] = []
    answered, running = asyncio.Event(), True

    async def caller(number: int) -> None:
        content = {"role": "user", "content": f"{number} " * (number % 7 + 1)}
        while running:
            answers.append(await served.ask(messages=[content]))
            answered.set()

    async with asyncio.TaskGroup() as callers:  # the first of them that fails ends it
        for number in range(32):
            callers.create_task(caller(number))
        for _ in range(served.publishes):
            enough = len(answers) + 8
            while len(answers) < enough:
                answered.clear()
                await answered.wait()
            await served.change()
            weights[served.version] = [weight.detach().clone() for weight in served.trained]
        running = False
    of_version = {version: [a for a in answers if a.version == version] for version in weights}
    assert sum(map(len, of_version.values())) == len(answers)
    for version, told in of_version.items():
        assert told
        with torch.no_grad():
            for weight, then in zip(served.trained, weights[version], strict=True):
                weight.copy_(then)
        assert max(map(served.gap, told)) < 1e-4
    await served.server.publish(served.version)  # what was served last is not in the model any more


@pytest.mark.slow
async def test_many_publishes_under_load(served: Served) -> None:
    for _ in range(4):
        await test_publishes_under_load_lose_no_call_and_mix_no_versions(served)


async def test_adapters_are_served_by_name_and_have_their_own_versions(served: Served) -> None:
    if served.adapters is None:
        pytest.skip("all weights are trained")
    before = await served.ask(temperature=0.0)
    for weight in served.adapters.parameters("other").values():
        weight.data.add_(0.1 * torch.randn_like(weight))
    await served.server.publish(served.version + 70, "other")
    other, same = await asyncio.gather(
        served.ask(model="other", temperature=0.0), served.ask(temperature=0.0)
    )
    assert (other.version, same.version) == (served.version + 70, served.version)
    assert (same.tokens, same.logprobs) == (before.tokens, pytest.approx(before.logprobs, abs=1e-4))
    assert served.gap(other) > 1e-2
    with served.adapters.using("other"):
        served.adapters, kept = None, served.adapters
        assert served.gap(other) < 1e-4
    served.adapters = kept


async def test_in_flight_every_token_has_the_version_it_names(served: Served) -> None:
    """Of a whole model a call goes on with the new weights; of an adapter it ends under its own.
    The prompt is the same for all: a prefix of another version would show in the first token."""
    server: Any = served.server
    if isinstance(server, EmbeddedServer):
        pytest.skip("the embedded server is made for it: see test_swap")
    weights = {served.version: [weight.detach().clone() for weight in served.trained]}
    url = f"{server.base_url}/chat/completions"
    body = {"model": server.model, "messages": HELLO, "logprobs": True, "return_token_ids": True}
    changes = getattr(server, "delivery", server)  # what knows how weights change
    changes.in_flight = True
    async with always_called(url, **body) as callers:
        for update in range(UPDATES):
            if update >= 3 and (callers.crossed or served.adapters):
                break
            await callers.more(5)  # four may have begun before the update
            served.disturb()
            await server.publish(served.version + 1)
            served.version += 1
            weights[served.version] = [weight.detach().clone() for weight in served.trained]
    answers: list[tuple[Answer, list[tuple[int, int]]]] = []
    for answer in callers.answers:
        assert isinstance(answer, dict), answer
        (choice,), version = answer["choices"], answer["version"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        told = Answer(version, answer["prompt_token_ids"], choice["token_ids"], logprobs)
        answers.append((told, choice.get("agentrl_spans") or [(0, version)]))
    changes.in_flight = False
    crossed = [spans for _, spans in answers if len(spans) > 1]
    assert len({spans[0][1] for _, spans in answers}) > 1
    assert bool(crossed) == (served.adapters is None)
    found = {id(told): torch.full((len(told.tokens),), torch.inf) for told, _ in answers}
    for version, then in weights.items():
        with torch.no_grad():
            for weight, value in zip(served.trained, then, strict=True):
                weight.copy_(value)
        for answer, spans in answers:
            ends = [start for start, _ in spans[1:]] + [len(answer.tokens)]
            gaps = (served.logprobs(answer) - torch.tensor(answer.logprobs)).abs()
            for (start, named), end in zip(spans, ends, strict=True):
                if named == version:
                    found[id(answer)][start:end] = gaps[start:end]
    assert max(float(gaps.max()) for gaps in found.values()) < 1e-3


async def test_frozen_policies_come_and_go_while_it_serves(served: Served) -> None:
    if served.adapters is None:
        pytest.skip("all weights are trained")
    before = await served.ask(temperature=0.0)
    for version in (7, 8):  # the second in the place of the first
        name = f"policy@{version:06d}"
        served.adapters.add(name, rank=3, alpha=8.0)
        for weight in served.adapters.parameters(name).values():
            weight.data.add_(0.1 * torch.randn_like(weight))
        async with served.server.updating():
            await served.server.add(name, version)
            served.adapters.add("late", rank=2, alpha=8.0)
            with pytest.raises(
                PolicyError, match=r"room for 3 adapters .*; let fewer play at once"
            ):
                await served.server.add("late", 1)
            served.adapters.close("late")
        frozen, same = await asyncio.gather(
            served.ask(model=name, temperature=0.0), served.ask(temperature=0.0)
        )
        assert (frozen.version, same.version) == (version, served.version)
        assert same.logprobs == pytest.approx(before.logprobs, abs=1e-4)
        with served.adapters.using(name):
            served.adapters, kept = None, served.adapters
            assert served.gap(frozen) < 1e-4
        served.adapters = kept
        async with served.server.updating():
            await served.server.remove(name)
        served.adapters.close(name)
        async with served.post(model=name) as reply:
            assert reply.status == 404


async def test_a_policy_that_is_not_there_is_a_sentence(served: Served) -> None:
    with pytest.raises(PolicyError, match="nobody"):
        await served.server.publish(served.version, "nobody")
