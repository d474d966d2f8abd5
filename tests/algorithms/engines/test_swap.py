"""Weights that change while calls run: which version made which token, and from which keys."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from agentrl.algorithms.engines.embedded.attention import TokenUpdate
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.load import load_model
from tests.algorithms.engines.test_engine import Desk, reference

EXACT = 1e-5  # between a recorded log-prob and that of a full forward pass, float32


class SwappingDesk(Desk):
    """An engine whose weights change between steps: version n has `weights[n]`."""

    def __init__(self, directory: Path, *, change: float = 0.03, **settings: Any) -> None:
        model, _ = load_model(directory, device="cpu")
        self.models = [copy.deepcopy(model)]
        super().__init__(model, **settings)
        self.change = change

    def swap(self) -> None:
        """May be called on the engine's thread: the swap is done before its next step."""
        newer = copy.deepcopy(self.models[-1])
        torch.manual_seed(len(self.models))
        with torch.no_grad():
            for weight in newer.parameters():
                weight.mul_(1 + self.change * torch.randn_like(weight))
        self.models.append(newer)
        weights = newer.state_dict()
        load = lambda: [w.copy_(weights[n]) for n, w in self.model.state_dict().items()]  # noqa: E731
        self.engine.swap(0, len(self.models) - 1, load)

    def swap_after(self, *counts: int) -> Callable[[int], bool]:
        """For `stop` of a call: swaps after these of its tokens, and never stops."""
        seen = []

        def watch(token: int) -> bool:
            seen.append(token)
            if len(seen) in counts:
                self.swap()
            return False

        return watch

    def gaps(self, call: Any, update: TokenUpdate) -> list[np.ndarray]:
        """By span: how far its log-probs are from those of the version it names."""
        starts = [start for start, _ in update.spans]
        ends = [*starts[1:], len(update.tokens)]
        return [
            np.abs(
                reference(self.models[version], call.prompt.tolist(), update, 1.0)[start:end]
                - update.logprobs[start:end]
            )
            for (start, version), end in zip(update.spans, ends, strict=True)
        ]

    def whole(self, call: Any) -> TokenUpdate:
        """The only update of a call that does not stream, with its spans."""
        self.result(call)
        return self.updates[call][-1]


@pytest.fixture
def desks(tiny_model_dir: Path) -> Any:
    made: list[SwappingDesk] = []

    def make_desk(**settings: Any) -> SwappingDesk:
        made.append(SwappingDesk(tiny_model_dir, **settings))
        return made[-1]

    yield make_desk
    for each in made:
        each.engine.close()


def ask_many(desk: SwappingDesk, *swaps: int) -> list[tuple[Any, TokenUpdate]]:
    """Calls of every length and amount of shared prefix, more than fit at once, and swaps."""
    dice = np.random.default_rng(0)
    trunk = dice.integers(3, 400, 60).tolist()
    watch = desk.submit(trunk, max_tokens=60, stop=desk.swap_after(*swaps))
    calls = [watch]
    for number in range(20):
        prompt = trunk[: dice.integers(0, 60)] + dice.integers(3, 400, 4).tolist()
        size = int(dice.integers(1, 30))
        calls.append(desk.submit(prompt, seed=number, max_tokens=size))
    return [(call, desk.whole(call)) for call in calls]


def test_with_recomputed_keys_log_probs_are_of_their_version(desks: Any) -> None:
    desk = desks(max_batch=6)
    answers = ask_many(desk, 5, 6, 20)
    for call, update in answers:
        starts = [start for start, _ in update.spans]
        versions = [version for _, version in update.spans]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        assert starts[-1] < len(update.tokens)
        assert versions == sorted(set(versions))
        assert max(gap.max() for gap in desk.gaps(call, update)) < EXACT
    assert any(len(update.spans) > 1 for _, update in answers)
    assert answers[0][1].spans[:3] == [(0, 0), (5, 1), (6, 2)]
    assert any(update.spans == [(0, 3)] for _, update in answers)  # begun after all swaps


def test_a_swap_to_equal_weights_changes_no_token(desks: Any) -> None:
    plain, swapped = desks(), desks(change=0.0)
    expected = {c.seed: u for c, u in ask_many(plain)[1:]}
    for call, update in ask_many(swapped, *range(1, 60, 3))[1:]:
        assert update.tokens == expected[call.seed].tokens
        np.testing.assert_allclose(update.logprobs, expected[call.seed].logprobs, atol=EXACT)


async def complete(
    client: httpx.AsyncClient, **body: Any
) -> tuple[int, list[int], list[list[int]] | None]:
    """Version of the header, tokens and spans of an answer, streamed or not."""
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "return_token_ids": True, "seed": 3} | body
    response = await client.post("/completions", json=body)
    assert response.status_code == 200
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all("agentrl_spans" not in choice for choice in choices[:-1])
    tokens = [token for choice in choices for token in choice["token_ids"]]
    version = int(response.headers["x-policy-version"])
    return version, tokens, choices[-1].get("agentrl_spans")


async def test_published_weights_reach_running_calls(tiny_model_dir: Path) -> None:
    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    first = copy.deepcopy(model)
    server = EmbeddedServer(model, tokenizer, max_batch=16, in_flight=True)
    await server.start()
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        plain = await complete(client)
        calls = [
            asyncio.create_task(complete(client, stream=n % 2 == 0, max_tokens=80))
            for n in range(8)
        ]
        version = 0
        while not all(call.done() for call in calls):
            await complete(client, max_tokens=4)
            version += 1
            await server.publish(version)  # while calls run
        answers = [await call for call in calls]
        assert len({tuple(tokens) for _, tokens, _ in [*answers]}) == 1  # the weights are the same
        assert all(tokens[:40] == plain[1] for _, tokens, _ in answers)
        for first_version, _, spans in answers:
            assert spans is not None
            assert spans[0] == [0, first_version]
            assert spans == sorted(spans)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        assert await complete(client) == (version, plain[1], None)  # written, and not published
        await server.publish(version + 1)
        found = await complete(client)
        assert (found[0], found[2]) == (version + 1, None)
        assert found[1] != plain[1]
    await server.close()
    assert len(server.pauses) == version + 1
    for weight, before in zip(model.parameters(), first.parameters(), strict=True):
        assert torch.equal(weight, before * 1.1)  # the server wrote nothing


async def test_no_swap_is_waited_for_once_the_engine_is_closed(desks: Any) -> None:
    desk = desks()
    desk.engine.close()
    with pytest.raises(Exception, match="shutting down"):
        desk.engine.swap(0, 1).result(timeout=5)


def test_a_call_may_be_cancelled_before_keys_are_recomputed(desks: Any) -> None:
    desk = desks()

    def leave(token: int) -> bool:  # on the engine's thread: both come before the next step
        assert asked.wait(timeout=30)
        desk.swap()
        desk.engine.cancel(call)
        return False

    asked = threading.Event()
    call = desk.submit([5, 6, 7], max_tokens=60, stop=leave)
    asked.set()
    assert desk.whole(call).finish == "cancelled"
    later = desk.submit([5, 6, 7], max_tokens=3)
    assert desk.whole(later).finish == "length"
    assert desk.gaps(later, desk.whole(later))[0].max() < EXACT


def test_a_swap_that_nobody_waits_for_any_more_is_not_done(desks: Any) -> None:
    desk = desks()
    begun, goes_on, loaded = threading.Event(), threading.Event(), []

    def block() -> None:
        begun.set()
        assert goes_on.wait(timeout=30)

    first = desk.engine.swap(0, 0, block)
    assert begun.wait(timeout=30)
    given_up = desk.engine.swap(0, 1, lambda: loaded.append(1))
    assert given_up.cancel()
    goes_on.set()
    first.result(timeout=30)
    call = desk.submit([5, 6, 7], max_tokens=3)
    assert desk.whole(call).spans == [(0, 0)]
    assert loaded == []
