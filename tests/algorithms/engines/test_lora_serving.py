"""Several policies served by one process: adapters of one base, row by row in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from agentrl.algorithms.engines.embedded import engine as engine_module
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.core.types import Sampling
from tests.algorithms.engines.test_engine import Desk, reference
from tests.algorithms.engines.test_swap import complete
from tests.algorithms.learners.test_learner import make_batch, psi_for
from tests.algorithms.model.test_lora import BOTH, make

POLICIES = [*BOTH, None]  # None: the base alone
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def base(tiny_model_dir: Path) -> Path:
    return tiny_model_dir


def desk_of(adapters: LoraAdapters, **settings: Any) -> Desk:
    return Desk(adapters.model, adapters=adapters, policies=POLICIES, **settings)


@pytest.mark.parametrize(
    ("fixture", "prefill"),
    [("tiny_model_dir", 16), ("tiny_llama_dir", 512), ("tiny_moe_dir", 16), ("tiny_moe_dir", 512)],
)
def test_every_row_is_computed_by_its_own_policy(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fixture: str, prefill: int
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", prefill)
    adapters = make(request.getfixturevalue(fixture))
    desk = desk_of(adapters, max_batch=5)
    dice = np.random.default_rng(0)
    trunk = dice.integers(3, 400, 100).tolist()  # shared by calls to different policies
    calls = [
        desk.submit(
            trunk[: dice.integers(0, 100)] + dice.integers(3, 400, 5).tolist(),
            seed=number,
            policy=number % 3,
            temperature=[1.0, 0.0][number % 2],
            max_tokens=int(dice.integers(1, 20)),
        )
        for number in range(30)
    ]
    updates = [desk.result(call) for call in calls]
    desk.engine.close()
    for call, update in zip(calls, updates, strict=True):
        with adapters.using(POLICIES[call.policy]):
            expected = reference(
                adapters.model, call.prompt.tolist(), update, call.sampling.temperature
            )
        np.testing.assert_allclose(update.logprobs, expected, atol=1e-5)


def test_several_policies_sample_what_each_samples_alone(base: Path) -> None:
    adapters = make(base)
    prompt = list(range(3, 30))
    together = desk_of(adapters)
    calls = [together.submit(prompt, seed=n, policy=n % 3, max_tokens=12) for n in range(9)]
    mixed = [together.result(call).tokens for call in calls]
    together.engine.close()
    alone = desk_of(adapters, max_batch=1)
    one = [alone.run(prompt, seed=n, policy=n % 3, max_tokens=12).tokens for n in range(9)]
    alone.engine.close()
    assert mixed == one


def test_a_prefix_is_shared_within_a_policy_and_its_weights(base: Path) -> None:
    desk = desk_of(make(base))
    prompt = list(range(3, 53))

    def fed(policy: int) -> int:
        before = desk.fed
        desk.run(prompt, policy=policy, max_tokens=1)
        return desk.fed - before

    assert [fed(0), fed(1), fed(2)] == [50, 50, 50]
    assert [fed(0), fed(1), fed(2)] == [1, 1, 1]
    desk.engine.swap(1)
    assert [fed(0), fed(1), fed(2)] == [1, 50, 1]
    desk.engine.close()


@pytest.fixture
async def served(base: Path) -> AsyncIterator[tuple[LoraAdapters, Any, httpx.AsyncClient]]:
    """Two adapters, a started server of both and of their base, and a client."""
    adapters = make(base, trained=False)
    tokenizer = load_model(base, device="cpu")[1]
    defaults = Sampling(max_tokens=8, temperature=0.0)
    server = EmbeddedServer(
        adapters.model, tokenizer, name="base", adapters=adapters, defaults=defaults
    )
    await server.start()
    async with httpx.AsyncClient(base_url=server.base_url, timeout=30) as client:
        yield adapters, server, client
    await server.close()


async def ask(client: httpx.AsyncClient, model: str | None) -> httpx.Response:
    body = {"messages": HELLO, "logprobs": True, "return_token_ids": True}
    return await client.post("/chat/completions", json=body | ({"model": model} if model else {}))


async def test_policies_are_trained_in_turn_and_served_at_once(
    base: Path, served: tuple[LoraAdapters, Any, httpx.AsyncClient]
) -> None:
    adapters, server, client = served
    tokenizer = load_model(base, device="cpu")[1]
    learners = {
        name: TorchLearner(adapters.model, tokenizer, threads=1, adapters=adapters, policy=name)
        for name in BOTH
    }
    versions = {"planner": 0, "solver": 0, "base": 0}
    seen: dict[str, set[float]] = {name: set() for name in versions}
    for turn, name in enumerate(["planner", "solver", "planner"]):
        async with server.updating():
            batch = make_batch(turn, rollouts=2)
            assert learners[name].step(batch, psi_for(batch), lr=0.02).applied
            versions[name] += 1
            await server.publish(versions[name], name)
        asked = list(versions) * 2
        for policy, response in zip(
            asked, await asyncio.gather(*(ask(client, policy) for policy in asked)), strict=True
        ):
            answer, choice = response.json(), response.json()["choices"][0]
            assert answer["model"] == policy
            assert response.headers["x-policy-version"] == str(versions[policy])
            found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            prompt, tokens = answer["prompt_token_ids"], choice["token_ids"]
            with adapters.using(None if policy == "base" else policy), torch.no_grad():
                logits = adapters.model(torch.tensor([prompt + tokens])).logits[0]
            rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
            expected = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            np.testing.assert_allclose(found, expected, atol=1e-5)
            seen[policy].add(round(found[0], 3))
    assert {name: len(values) for name, values in seen.items()} == {
        "planner": 2, "solver": 2, "base": 1,
    }  # fmt: skip


async def test_models_are_listed_and_an_unknown_one_is_refused(
    served: tuple[LoraAdapters, Any, httpx.AsyncClient],
) -> None:
    _, server, client = served
    await server.publish(3, "solver")
    listed = (await client.get("/models")).json()["data"]
    assert [card["id"] for card in listed] == ["base", "planner", "solver"]
    assert (await ask(client, "solver")).headers["x-policy-version"] == "3"
    unnamed = await ask(client, None)
    assert (unnamed.json()["model"], unnamed.headers["x-policy-version"]) == ("base", "0")
    refused = await ask(client, "solvr")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "'solvr' is served here; did you mean 'solver'?" in refused.json()["error"]["message"]


async def test_an_adapter_may_take_the_name_of_the_model(base: Path) -> None:
    adapters = make(base, {"planner": 4})
    tokenizer = load_model(base, device="cpu")[1]
    server = EmbeddedServer(adapters.model, tokenizer, name="planner", adapters=adapters)
    await server.start()
    async with httpx.AsyncClient(base_url=server.base_url, timeout=30) as client:
        answer = await client.post(
            "/completions",
            json={
                "model": "gpt-4o", "prompt": [5, 6], "max_tokens": 1, "logprobs": 0,
                "temperature": 0,
            },
        )  # fmt: skip
    await server.close()
    with adapters.using("planner"), torch.no_grad():
        expected = torch.log_softmax(adapters.model(torch.tensor([[5, 6]])).logits[0, -1], -1)
    (found,) = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert found == pytest.approx(float(expected.max()), abs=1e-5)


async def test_adapters_of_several_versions_are_served_side_by_side(tiny_model_dir: Path) -> None:
    adapters = make(tiny_model_dir, {"planner": 4, "solver": 2})
    tokenizer = load_model(tiny_model_dir, device="cpu")[1]
    server = EmbeddedServer(
        adapters.model, tokenizer, name="planner", adapters=adapters, in_flight=True,
        defaults=Sampling(temperature=0.0),
    )  # fmt: skip
    served = server._copy[1]
    assert served is not None
    assert served.model.lm_head.weight is adapters.model.lm_head.weight  # the base, once
    await server.start()
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        old = (await complete(client, model="planner"))[1]
        running = [
            asyncio.create_task(complete(client, model="planner", max_tokens=80)) for _ in range(3)
        ]
        await complete(client, model="solver", max_tokens=3)  # by then they run
        with torch.no_grad():
            for weight in adapters.parameters("planner").values():
                weight.add_(0.1)
        await server.publish(1, "planner")
        version, new, spans = await complete(client, model="planner")
        assert (version, spans) == (1, None)
        assert new != old
        for version, tokens, spans in [await each for each in running]:
            assert (version, spans) == (0, None)  # they ended under the version they began with
            assert tokens[:40] == old
        await server.publish(2, "planner")
        assert (await complete(client, model="planner"))[0] == 2
    await server.close()
    assert served.names == ["planner", "solver", "planner#1"]  # the adapter of version 1 is closed
