"""What every policy server must do, over real HTTP: the embedded one, and vLLM if installed."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch

from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.engines.choice import policy_server
from agentrl.algorithms.model import load_model
from agentrl.config import resolve

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "query", "parameters": {"type": "object"}}}]
VLLM = pytest.param(
    "vllm",
    marks=pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: run `make test-engines`"
    ),
)


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
    version: int = 0

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

    async def change(self) -> None:
        """Other weights, as the next version."""
        async with self.server.updating():
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.add_(0.05 * torch.randn_like(weight))
            await self.server.publish(self.version + 1)
        self.version += 1


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", VLLM])
async def served(
    request: pytest.FixtureRequest, wide_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    config = resolve(
        {
            "output": str(tmp_path_factory.mktemp("run")),
            "engine": {"kind": request.param, "max_context": 512},
        },
        source="test",
    )
    model, tokenizer = load_model(wide_model_dir, device="cpu")
    server = policy_server(config, model, tokenizer)
    await server.start()
    async with aiohttp.ClientSession() as http:
        yield Served(server, model, tokenizer, http)
    await server.close()
    with pytest.raises(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http:
            await http.get(f"{server.base_url}/models")
    await server.close()


@torch.no_grad()
def gap(model: Any, answer: Answer, temperature: float = 1.0) -> float:
    """Largest difference of the answer's log-probs from the model's."""
    row = torch.tensor([answer.prompt + answer.tokens])
    logprobs = (model(row).logits[0] / temperature).log_softmax(-1)
    ours = logprobs[len(answer.prompt) - 1 : -1].gather(1, torch.tensor(answer.tokens)[:, None])
    return float((ours[:, 0] - torch.tensor(answer.logprobs)).abs().max())


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
async def test_an_answer_has_its_tokens_and_the_log_probs_they_were_sampled_with(
    served: Served, temperature: float
) -> None:
    answer = await served.ask(temperature=temperature)
    prompt = served.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    assert answer.prompt == prompt
    assert 1 <= len(answer.tokens) <= 6
    assert gap(served.model, answer, temperature or 1.0) < 1e-4


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
    assert gap(served.model, after) < 1e-4
    assert gap(served.model, before) > 1e-2


async def test_calls_wait_while_weights_may_change(served: Served) -> None:
    async with served.server.updating():
        call = asyncio.create_task(served.ask())
        with torch.no_grad():
            served.model.model.norm.weight.mul_(1.5)
        await served.server.publish(served.version + 1)
        served.version += 1
        assert not call.done()
    answer = await call
    assert answer.version == served.version
    assert gap(served.model, answer) < 1e-4


async def test_publishes_under_load_lose_no_call_and_mix_no_versions(served: Served) -> None:
    """32 callers at a time, while the weights change ten times."""
    weights = {served.version: copy.deepcopy(served.model)}
    answers: list[Answer] = []
    running = True

    async def caller(number: int) -> None:
        content = {"role": "user", "content": f"{number} " * (number % 7 + 1)}
        while running:
            answers.append(await served.ask(messages=[content]))

    callers = [asyncio.create_task(caller(number)) for number in range(32)]
    for _ in range(10):
        seen = len(answers)
        while len(answers) < seen + 8:
            await asyncio.sleep(0)
            assert not any(task.done() for task in callers), "a caller failed"
        await served.change()
        weights[served.version] = copy.deepcopy(served.model)
    running = False
    await asyncio.gather(*callers)
    assert {answer.version for answer in answers} == set(weights)
    assert max(gap(weights[answer.version], answer) for answer in answers) < 1e-4
