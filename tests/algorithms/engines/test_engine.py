"""The engine against a plain forward pass of the same model, one sequence at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.engines.embedded import engine as engine_module
from agentrl.algorithms.engines.embedded.attention import (
    GenerationRequest,
    KVPool,
    TokenUpdate,
    cache_argument,
)
from agentrl.algorithms.engines.embedded.engine import Engine, TokenUpdates
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import pack_rows
from agentrl.core.processes import resident_bytes
from agentrl.core.types import Sampling

EOS = 2
OPTIONS = ("stream", "stop", "policy")  # of a call, beside those of sampling


class Desk:
    """An engine with a place where its updates arrive."""

    def __init__(self, model: Any, **settings: Any) -> None:
        self.model = model
        self.updates: dict[GenerationRequest, list[TokenUpdate]] = {}
        self.finished = threading.Condition()
        self.fed = 0  # tokens that went through the model
        model.register_forward_pre_hook(self._mark_ready, with_kwargs=True)
        options = {"max_batch": 8, "max_context": 256, "threads": 1, **settings}
        self.engine = Engine(model, eos=[EOS], deliver=self._deliver, **options)
        self.engine.start()

    def submit(self, prompt: list[int], *, seed: int = 0, **settings: Any) -> GenerationRequest:
        options = {name: settings.pop(name) for name in OPTIONS if name in settings}
        call = GenerationRequest(
            np.array(prompt, np.int32), Sampling(**settings), seed, lambda update: None, **options
        )
        self.engine.submit(call)
        return call

    def result(self, call: GenerationRequest) -> TokenUpdate:
        """All that was told about a finished call, as one update."""
        with self.finished:
            assert self.finished.wait_for(lambda: self._last(call), timeout=30)
        updates = self.updates[call]
        return TokenUpdate(
            [token for update in updates for token in update.tokens],
            [logprob for update in updates for logprob in update.logprobs],
            updates[-1].finish,
            updates[-1].error,
        )

    def run(self, prompt: list[int], **settings: Any) -> TokenUpdate:
        return self.result(self.submit(prompt, **settings))

    def _last(self, call: GenerationRequest) -> bool:
        return bool(self.updates.get(call)) and self.updates[call][-1].finish is not None

    def _deliver(self, updates: TokenUpdates) -> None:
        with self.finished:
            for call, update in updates:
                self.updates.setdefault(call, []).append(update)
            self.finished.notify_all()

    def _mark_ready(self, module: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("plan") is not None:
            self.fed += kwargs["input_ids"].shape[1] - kwargs["plan"].padding


@pytest.fixture
def desk(tiny_model_dir: Path) -> Iterator[Callable[..., Desk]]:
    desks = []

    def make(model: Any = None, **settings: Any) -> Desk:
        model = model or load_model(tiny_model_dir, device="cpu")[0]
        desks.append(Desk(model, **settings))
        return desks[-1]

    yield make
    for each in desks:
        each.engine.close()


def reference(model: Any, prompt: list[int], update: TokenUpdate, temperature: float) -> np.ndarray:
    """Log-probs of a completion by one forward pass over the whole sequence, without a cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *update.tokens]])).logits[0]
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(update.tokens)[:, None])[:, 0].numpy()


def check_mixture(make: Callable[..., Desk], model: Any, **settings: Any) -> Desk:
    """Forty calls of every length, temperature and amount of shared prefix, four at a time."""
    desk = make(model, max_batch=4, **settings)
    dice = np.random.default_rng(0)
    trunk = dice.integers(3, 400, 150).tolist()
    calls = []
    for number in range(40):
        own = dice.integers(3, 400, dice.integers(1, 40)).tolist()
        prompt = trunk[: dice.integers(0, 150)] + own
        calls.append(
            desk.submit(
                prompt,
                seed=number,
                temperature=[1.0, 0.6, 0.0][number % 3],
                top_p=0.9 if number % 4 == 0 else 1.0,
                max_tokens=int(dice.integers(1, 30)),
            )
        )
    worst = 0.0
    for call in calls:
        update = desk.result(call)
        assert update.finish in ("stop", "length")
        expected = reference(model, call.prompt.tolist(), update, call.sampling.temperature)
        worst = max(worst, float(np.abs(expected - update.logprobs).max()))
    assert worst < 1e-4
    return desk


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_llama_dir"])
def test_log_probs_equal_a_plain_forward_pass(
    request: pytest.FixtureRequest, desk: Callable[..., Desk], fixture: str
) -> None:
    model, _ = load_model(request.getfixturevalue(fixture), device="cpu")
    check_mixture(desk, model)


def test_long_prompts_are_fed_in_chunks(
    tiny_model_dir: Path, desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 16)
    check_mixture(desk, load_model(tiny_model_dir, device="cpu")[0])


def test_sliding_windows_are_respected(desk: Callable[..., Desk]) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, use_sliding_window=True, sliding_window=8,
        max_window_layers=1, initializer_range=0.3,
    )  # fmt: skip
    assert config.layer_types == ["full_attention", "sliding_attention"]
    check_mixture(desk, Qwen2ForCausalLM(config).eval())


def test_a_group_computes_its_prompt_once(desk: Callable[..., Desk]) -> None:
    group = desk()
    prompt = list(range(3, 103))
    calls = [group.submit(prompt, seed=seed, max_tokens=5) for seed in range(8)]
    assert len({tuple(group.result(call).tokens) for call in calls}) > 1
    # 99 tokens once, then for each of the eight the last prompt token and four sampled ones
    assert group.fed == 99 + 8 * 5


def test_the_next_turn_continues_the_last(desk: Callable[..., Desk]) -> None:
    chat = desk()
    prompt = list(range(3, 103))
    first = chat.run(prompt, max_tokens=20, temperature=0.0)
    fed = chat.fed
    turn = [*prompt, *first.tokens, 7, 8, 9]
    second = chat.run(turn, max_tokens=4, temperature=0.0)
    # the last sampled token was never fed, three are new, and of the four sampled the last is not
    assert chat.fed - fed == 1 + 3 + 3
    expected = reference(chat.model, turn, second, 0.0)
    np.testing.assert_allclose(second.logprobs, expected, atol=1e-4)


def test_old_prefixes_make_room(desk: Callable[..., Desk]) -> None:
    small = desk(max_batch=1)
    prompts = [[number, *range(10, 40)] for number in range(3, 9)]
    for prompt in prompts:
        small.run(prompt, max_tokens=2)
    fed = small.fed
    small.run(prompts[-1], max_tokens=2)
    assert small.fed - fed == 2
    small.run(prompts[0], max_tokens=2)  # two idle rows: forgotten long ago
    assert small.fed - fed == 2 + 31 + 1


def test_batch_mates_change_nothing(desk: Callable[..., Desk]) -> None:
    alone, crowd = desk(), desk()
    dice = np.random.default_rng(1)
    prompts = [dice.integers(3, 400, dice.integers(2, 60)).tolist() for _ in range(12)]
    calls = [crowd.submit(prompt, seed=seed, max_tokens=20) for seed, prompt in enumerate(prompts)]
    for seed, (prompt, call) in enumerate(zip(prompts, calls, strict=True)):
        assert alone.run(prompt, seed=seed, max_tokens=20).tokens == crowd.result(call).tokens
    assert alone.run(prompts[0], seed=99, max_tokens=20).tokens != crowd.result(calls[0]).tokens


def test_a_completion_ends_with_the_context(desk: Callable[..., Desk]) -> None:
    update = desk(max_context=64).run(list(range(3, 63)), max_tokens=100)
    assert (len(update.tokens), update.finish) == (4, "length")


def test_new_weights_are_not_answered_from_the_old_cache(desk: Callable[..., Desk]) -> None:
    trained = desk()
    prompt = list(range(3, 60))
    trained.run(prompt, max_tokens=8)
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.mul_(1.1)
    trained.engine.swap()
    update = trained.run(prompt, max_tokens=8)
    expected = reference(trained.model, prompt, update, 1.0)
    np.testing.assert_allclose(update.logprobs, expected, atol=1e-4)


def test_broken_weights_fail_calls_and_leave_nothing_behind(desk: Callable[..., Desk]) -> None:
    broken = desk()
    weight = broken.model.model.layers[0].mlp.down_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    update = broken.run([5, 6, 7], max_tokens=4)
    assert update.finish == "error"
    assert "not finite" in update.error
    with torch.no_grad():
        weight.copy_(kept)
    assert broken.run([5, 6, 7], max_tokens=4).finish == "length"


def test_a_model_that_fails_fails_its_calls_only(desk: Callable[..., Desk]) -> None:
    failing = desk()
    handle = failing.model.register_forward_hook(_out_of_memory)
    update = failing.run([5, 6, 7])
    assert (update.finish, update.error) == ("error", "the model failed: out of memory")
    handle.remove()
    assert failing.run([5, 6, 7], max_tokens=4).finish == "length"


def _out_of_memory(*args: Any) -> None:
    raise RuntimeError("out of memory\nand a long story")


def test_streams_tell_every_token(desk: Callable[..., Desk]) -> None:
    streaming = desk()
    call = streaming.submit([5, 6, 7], max_tokens=6, stream=True)
    whole = streaming.run([5, 6, 7], max_tokens=6)
    assert streaming.result(call) == whole
    assert [len(update.tokens) for update in streaming.updates[call]] == [1] * 6


def test_a_call_may_stop_itself(desk: Callable[..., Desk]) -> None:
    seen: list[int] = []

    def third(token: int) -> bool:
        seen.append(token)
        return len(seen) == 3

    update = desk().run([5, 6, 7], max_tokens=50, stop=third)
    assert (update.tokens, update.finish) == (seen, "stop")


def test_a_cancelled_call_makes_room_for_the_next(desk: Callable[..., Desk]) -> None:
    busy = desk(max_batch=1)
    held = threading.Event()

    def wait(token: int) -> bool:
        held.wait(30)
        return False

    running = busy.submit([5, 6, 7], max_tokens=200, stop=wait)
    waiting = busy.submit([8, 9], max_tokens=200)
    last = busy.submit([10, 11], max_tokens=3)
    busy.engine.cancel(running)
    busy.engine.cancel(waiting)
    held.set()
    assert busy.result(last).finish == "length"
    assert busy.result(running).finish == busy.result(waiting).finish == "cancelled"
    busy.engine.cancel(last)  # too late: nothing happens
    assert busy.run([12], max_tokens=1).finish == "length"
    assert len(busy.updates[last]) == 1


def test_closing_fails_what_is_unfinished(desk: Callable[..., Desk]) -> None:
    closing = desk(max_batch=1)
    calls = [closing.submit([5, 6, 7], max_tokens=250) for _ in range(3)]
    closing.engine.close()
    late = closing.submit([5])
    assert {closing.result(call).finish for call in [*calls, late]} <= {"error", "length"}
    assert "shutting down" in closing.result(late).error


@pytest.mark.parametrize("way", ["cached", "whole"])
def test_calls_are_answered_by_the_models_own_forward_pass(
    desk: Callable[..., Desk], way: str
) -> None:
    served = desk(way=way)
    settings = {"max_tokens": 6, "temperature": 0.7}
    calls = [served.submit(prompt, seed=5, **settings) for prompt in ([5, 6, 7], [9, 5, 6, 7, 8])]
    answers = [served.result(call) for call in calls]
    again = served.run([5, 6, 7], seed=5, **settings)
    assert again.tokens == answers[0].tokens
    for call, answer in zip(calls, answers, strict=True):
        ids = torch.tensor([[*call.prompt.tolist(), *answer.tokens]])
        with torch.no_grad():
            logits = served.model(input_ids=ids[:, :-1], use_cache=False).logits[0]
        exact = (logits / 0.7).log_softmax(-1)[len(call.prompt) - 1 :]
        expected = exact.gather(1, ids[0, len(call.prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("way", ["cached", "whole"])
def test_new_weights_are_used_by_running_calls(desk: Callable[..., Desk], way: str) -> None:
    served = desk(way=way)
    before = served.run([5, 6, 7], max_tokens=5)
    head = served.model.get_output_embeddings().weight
    with torch.no_grad():
        head.add_(torch.linspace(-1, 1, head.shape[1]))
    served.engine.swap(version=1).result()
    after = served.run([5, 6, 7], max_tokens=5)
    assert after.logprobs != before.logprobs


def test_any_error_of_the_model_is_its_sentence(desk: Callable[..., Desk]) -> None:
    served = desk()

    def broken(*given: object, **named: object) -> None:
        raise AttributeError("'KVPool' object has no attribute 'layers'")

    served.model.register_forward_pre_hook(broken)
    answer = served.run([5, 6, 7], max_tokens=2)
    assert answer.finish == "error"
    assert answer.error == (
        "the model failed: AttributeError: 'KVPool' object has no attribute 'layers'"
    )


def test_serving_does_not_change_what_is_trained_or_saved(
    tiny_model_dir: Path, tmp_path: Path, desk: Callable[..., Desk]
) -> None:
    plain, _ = load_model(tiny_model_dir, device="cpu")
    served = desk()
    served.run([5, 6, 7], max_tokens=4)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    losses = [
        model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        for model in (plain, served.model)
    ]
    assert losses[0].item() == losses[1].item()
    losses[1].backward()
    served.model.save_pretrained(tmp_path)
    assert "agentrl" not in (tmp_path / "config.json").read_text()


def test_one_model_is_served_and_trained_in_turns(desk: Callable[..., Desk]) -> None:
    served, prompt = desk(), [5, 6, 7]
    before = served.run(prompt, max_tokens=8, temperature=0.7)
    tokens = torch.tensor([*prompt, *before.tokens])
    actions = torch.arange(len(prompt), len(tokens))
    temperature = torch.full((len(actions),), 0.7)
    row = TokenRow(tokens, actions, torch.tensor(before.logprobs), temperature, 0 * actions)
    (pack,) = pack_rows([row, row], "trie", 100)
    logprobs = forward_logprobs(served.model, pack)
    torch.autograd.backward(logprobs.sum())
    torch.testing.assert_close(logprobs.detach(), row.logprobs.repeat(2), atol=1e-4, rtol=0)
    assert served.run(prompt, max_tokens=8, temperature=0.7).tokens == before.tokens


def test_the_pool_is_a_cache_by_the_protocol_of_transformers() -> None:
    """What masks and layers ask of it: masks are the plan's, so no layer slides or has a past."""
    pool = KVPool(layers=3, rows=2, capacity=8, largest=32)
    assert len(pool) == len(pool.layers) == 3
    assert pool.is_sliding == [False] * 3
    assert [pool.get_seq_length(layer) for layer in range(3)] == [0] * 3
    assert pool.layers[1].get_mask_sizes(5) == pool.layers[1].get_mask_sizes(torch.arange(5))
    assert pool.layers[1].get_mask_sizes(5) == (5, 0)
    assert (pool.layers[2].get_max_length(), pool.layers[2].get_max_cache_shape()) == (32, 32)
    pool.set_write_positions(torch.tensor([1, 0]), torch.tensor([4, 0]))
    new = torch.arange(12.0).view(1, 2, 2, 3)  # [1, heads, N, dim]
    for layer in range(3):
        keys, values = pool.update(new + layer, -new - layer, layer)
        assert keys[1, :, 4].tolist() == (new + layer)[0, :, 0].tolist()
        assert values[0, :, 0].tolist() == (-new - layer)[0, :, 1].tolist()
    assert float(pool.tensors[0].count_nonzero()) == 3 * 12 - 1


def test_the_pool_has_only_the_memory_that_is_written() -> None:
    pool = KVPool(layers=8, rows=65, capacity=512, largest=4096)
    before = resident_bytes()
    for length in (1, 1000):
        lengths = np.array([0] * 64 + [length])
        pool.set_write_positions(torch.tensor([64]), torch.tensor([length - 1]))
        for layer in range(8):
            pool.update(torch.ones(1, 2, 1, 64), torch.ones(1, 2, 1, 64), layer)
        pool.reserve(2 * pool.capacity, lengths)
    # all of it would be 2.2 GB, its one row 34 MB
    assert resident_bytes() - before < 100e6
    assert pool.capacity == 2048
    assert float(pool.tensors[0].count_nonzero()) == 2 * 8 * 2 * 64


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_has_the_name_that_the_model_gives_it(name: str) -> None:
    class Decoder(torch.nn.Module):
        base_model: Any = property(lambda self: self)

    exec(f"def forward(self, input_ids, {name}=None): ...", scope := {})
    Decoder.forward = scope["forward"]  # type: ignore[method-assign]
    assert cache_argument(Decoder()) == name
