from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.base import Learner, LossCoefficients
from agentrl.algorithms.learners.memory import is_out_of_memory, layers_of
from agentrl.algorithms.learners.optimizer import FILE as OPTIMIZER
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import Pack, pack_rows
from agentrl.core.errors import PolicyError, TrainingError
from agentrl.core.types import Rollout, Transition
from tests import factories

VOCABULARY = 512


def make_batch(seed: int = 0, rollouts: int = 6, shared: int = 0) -> Batch:
    """Rollouts of two calls, the second of which extends the first; all begin with some shared
    tokens."""
    generator = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(generator.randint(least, most))]

    def call(name: str, prompt: list[int]) -> Transition:
        action = tokens(1, 8)
        return factories.call(name, prompt, action, logprob=-6.0)

    def rollout(index: int) -> Rollout:
        first = call(f"{index}/0", [*range(shared), *tokens(1, 20)])
        second = call(f"{index}/1", [*first.prompt, *first.completion, *tokens(0, 10)])
        return factories.rollout(str(index), [first, second], index=index, attempt="a")

    return build_batch([factories.group(*map(rollout, range(rollouts)))])


def psi_for(batch: Batch) -> LossCoefficients:
    """Depends on both arguments, as the clipped objectives do."""
    credit = torch.linspace(-1, 1, batch.n_tokens, dtype=torch.float64) / batch.n_tokens

    def psi(logprobs: Tensor, tokens: Tensor) -> Tensor:
        assert not logprobs.requires_grad
        return credit[tokens] * logprobs.double().exp().clamp(0.01, 1.0)

    return psi


def alone(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Log-probs of every row by itself, in token order."""
    return torch.cat(
        [forward_logprobs(model, pack_rows([row], "rows", 1)[0]) for row in batch.rows]
    )


MakeLearner = Callable[..., TorchLearner]


def learners_from(directory: Path) -> MakeLearner:
    """Learners that start from the same weights."""

    def make(dtype: torch.dtype = torch.float32, **settings: float) -> TorchLearner:
        model, tokenizer = load_model(directory, device="cpu")
        return TorchLearner(model.to(dtype), tokenizer, **{"threads": 1, **settings})

    return make


@pytest.fixture
def make_learner(tiny_model_dir: Path) -> MakeLearner:
    """Of a Qwen2 with tied embeddings."""
    return learners_from(tiny_model_dir)


@pytest.fixture(params=["tiny_model_dir", "tiny_llama_dir"])
def make_either(request: pytest.FixtureRequest) -> MakeLearner:
    """Of it, or of a Llama with untied ones, where a head has gradients or a file of its own."""
    return learners_from(request.getfixturevalue(request.param))


def weights(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


def test_the_gradient_does_not_depend_on_the_token_budget(make_either: MakeLearner) -> None:
    batch = make_batch()
    updated, norms = [], []
    for budget in (1, 60, 10_000):
        learner = make_either(torch.float64, token_budget=budget)
        report = learner.step(batch, psi_for(batch), lr=1e-2)
        assert report.applied
        norms.append(report.grad_norm)
        # The first moment after one step is (1 - beta) times the clipped gradient.
        updated.append([state["exp_avg"] for state in learner.optimizer.inner.state.values()])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-10)
    for other in updated[1:]:
        for first, second in zip(updated[0], other, strict=True):
            torch.testing.assert_close(first, second, atol=1e-10 * norms[0], rtol=0)


def test_the_gradient_is_that_of_the_one_loss(make_either: MakeLearner) -> None:
    batch, psi = make_batch(), psi_for(make_batch())
    learner = make_either(torch.float64, max_grad_norm=1e9, token_budget=64)
    logprobs = alone(learner.model, batch)
    loss = -(psi(logprobs.detach(), torch.arange(batch.n_tokens)) * logprobs).sum()
    expected = torch.autograd.grad(loss, list(learner.optimizer.parameters.values()))
    report = learner.step(batch, psi, lr=1e-3)
    assert report.loss == pytest.approx(loss.item(), rel=1e-10)
    assert report.tokens == sum(len(pack.tokens) for pack in pack_rows(batch.rows, "trie", 64))
    torch.testing.assert_close(report.logprobs, logprobs.detach().float())
    states = learner.optimizer.inner.state.values()
    for gradient, state in zip(expected, states, strict=True):
        torch.testing.assert_close(state["exp_avg"], gradient * (1 - 0.9), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("packing", ["rows", "trie"])
def test_the_gradient_of_the_entropy_is_that_of_all_logits(
    make_either: MakeLearner, packing: str
) -> None:
    """At the temperatures of the tokens, weighed by eta beside psi."""
    batch = make_batch(shared=9)
    psi = psi_for(batch)
    for number, row in enumerate(batch.rows):
        row.temperature.fill_(0.5 + number / 4)
    entropy_weights = torch.linspace(0, 0.3, batch.n_tokens, dtype=torch.float64)
    learner = make_either(torch.float64, max_grad_norm=1e9, token_budget=64, packing=packing)
    dense = []
    for row in batch.rows:
        logits = learner.model(row.tokens[None]).logits[0, row.actions - 1]
        dense.append((logits / row.temperature[:, None]).log_softmax(-1))
    every = torch.cat(dense)
    actions = torch.cat([row.tokens[row.actions] for row in batch.rows])
    logprobs = every.gather(1, actions[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    loss = -(
        psi(logprobs.detach(), torch.arange(batch.n_tokens)) * logprobs + entropy_weights * entropy
    ).sum()
    expected = torch.autograd.grad(loss, list(learner.optimizer.parameters.values()))
    report = learner.step(batch, psi, lr=1e-3, entropy_weights=entropy_weights)
    assert report.applied
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    for gradient, state in zip(expected, learner.optimizer.inner.state.values(), strict=True):
        torch.testing.assert_close(state["exp_avg"] / 0.1, gradient, atol=1e-6, rtol=1e-6)


def test_logprobs_are_those_the_step_sees(make_learner: MakeLearner) -> None:
    batch, learner = make_batch(), make_learner(token_budget=50)
    before = learner.logprobs(batch)
    assert before.dtype is torch.float32
    assert not before.requires_grad
    assert torch.equal(before, learner.step(batch, psi_for(batch), lr=1e-3).logprobs)
    assert not torch.equal(before, learner.logprobs(batch))


def test_a_step_follows_psi(make_learner: MakeLearner) -> None:
    batch, learner = make_batch(), make_learner()
    before = learner.logprobs(batch)
    for _ in range(5):
        learner.step(batch, lambda logprobs, tokens: torch.ones(len(tokens)), lr=1e-3)
    assert (learner.logprobs(batch) - before).mean() > 0.5


def test_the_gradient_norm_is_reported_before_clipping(make_learner: MakeLearner) -> None:
    batch = make_batch()
    free = make_learner(max_grad_norm=1e9).step(batch, psi_for(batch), lr=1e-3)
    learner = make_learner(max_grad_norm=free.grad_norm / 10)
    assert learner.step(batch, psi_for(batch), lr=1e-3).grad_norm == pytest.approx(free.grad_norm)
    first_moments = [
        state["exp_avg"].norm() / 0.1 for state in learner.optimizer.inner.state.values()
    ]
    assert torch.stack(first_moments).norm().item() == pytest.approx(free.grad_norm / 10, rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(
    make_learner: MakeLearner, value: float
) -> None:
    batch = make_batch()
    plain, struck = make_learner(), make_learner()

    def broken(logprobs: Tensor, tokens: Tensor) -> Tensor:
        return torch.where(tokens == 3, value, 0.1)

    for learner in (plain, struck):
        learner.step(batch, psi_for(batch), lr=1e-3)
    before = weights(struck)
    report = struck.step(batch, broken, lr=1.0)
    assert not report.applied
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(struck).items())
    for learner in (plain, struck):
        learner.step(batch, psi_for(batch), lr=1e-3)
    assert all(torch.equal(weights(plain)[name], t) for name, t in weights(struck).items())


def test_a_batch_without_tokens_changes_nothing(make_learner: MakeLearner) -> None:
    learner = make_learner(weight_decay=0.1)
    before = weights(learner)
    report = learner.step(build_batch([]), lambda logprobs, tokens: logprobs, lr=1.0)
    assert (report.applied, report.loss, report.tokens) == (False, 0.0, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())


def test_nothing_of_a_step_stays_behind(make_learner: MakeLearner) -> None:
    batch, learner = make_batch(), make_learner(threads=2)
    threads = torch.get_num_threads()
    inside: list[int] = []

    def psi(logprobs: Tensor, tokens: Tensor) -> Tensor:
        inside.append(torch.get_num_threads())
        return torch.ones(len(tokens))

    def broken(logprobs: Tensor, tokens: Tensor) -> Tensor:
        raise ArithmeticError

    assert not learner.step(batch, psi, lr=1e-3).logprobs.requires_grad
    learner.token_budget = 1
    with pytest.raises(ArithmeticError):
        learner.step(batch, broken, lr=1e-3)
    assert set(inside) == {2}
    assert torch.get_num_threads() == threads
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_resuming_is_bitwise_the_same_as_never_stopping(
    make_either: MakeLearner, tmp_path: Path
) -> None:
    batches = [make_batch(seed) for seed in range(4)]
    learner = make_either(weight_decay=0.1)
    for batch in batches[:2]:
        learner.step(batch, psi_for(batch), lr=1e-2)
    learner.save(tmp_path / "checkpoint")
    resumed = make_either(weight_decay=0.1)
    resumed.load(tmp_path / "checkpoint")
    for batch in batches[2:]:
        reports = [each.step(batch, psi_for(batch), lr=1e-2) for each in (learner, resumed)]
        assert reports[0].loss == reports[1].loss
    assert all(torch.equal(weights(learner)[name], t) for name, t in weights(resumed).items())


def test_a_checkpoint_is_an_ordinary_hugging_face_directory(
    make_either: MakeLearner, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    learner: Learner = make_either()
    batch = make_batch()
    learner.step(batch, psi_for(batch), lr=1e-2)
    capfd.readouterr()
    learner.save(tmp_path)
    assert capfd.readouterr() == ("", "")  # no progress bar in the middle of the live view
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(alone(model, batch), learner.logprobs(batch))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "Oslo"}]
    assert "user\nOslo" in tokenizer.apply_chat_template(chat, tokenize=False)
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".json", ".jinja"}


def test_a_checkpoint_from_before_the_first_step_loads(
    make_either: MakeLearner, tmp_path: Path
) -> None:
    fresh, used = make_either(), make_either()
    fresh.save(tmp_path)
    batch = make_batch()
    used.step(batch, psi_for(batch), lr=1e-2)
    used.load(tmp_path)
    assert not used.optimizer.inner.state
    assert all(torch.equal(weights(fresh)[name], t) for name, t in weights(used).items())


def test_a_checkpoint_of_another_model_is_refused(
    tiny_model_dir: Path, tiny_llama_dir: Path
) -> None:
    learner = TorchLearner(*load_model(tiny_model_dir, device="cpu"))
    before = weights(learner)
    with pytest.raises(PolicyError, match=r"of another model .*resume with the model"):
        learner.load(tiny_llama_dir)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())


@pytest.mark.parametrize("name", ["model.safetensors", OPTIMIZER, "config.json"])
@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_half_written_checkpoint_is_refused(
    tiny_model_dir: Path, tmp_path: Path, name: str, how: str
) -> None:
    learner = TorchLearner(*load_model(tiny_model_dir, device="cpu"))
    batch = make_batch()
    learner.step(batch, psi_for(batch), lr=1e-2)
    learner.save(tmp_path)
    learner.step(batch, psi_for(batch), lr=1e-2)
    before = weights(learner)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if how == "cut":
        (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(PolicyError, match=str(tmp_path)):
        learner.load(tmp_path)
    assert all(torch.equal(before[n], tensor) for n, tensor in weights(learner).items())


def test_an_optimizer_of_other_parameters_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    learner = TorchLearner(*load_model(tiny_model_dir, device="cpu"))
    batch = make_batch()
    learner.step(batch, psi_for(batch), lr=1e-2)
    learner.save(tmp_path)
    name = sorted(load_file(tmp_path / OPTIMIZER))[0]
    del learner.optimizer.parameters[name.rpartition("/")[0]]
    with pytest.raises(PolicyError, match="another model"):
        learner.load(tmp_path)


@pytest.mark.parametrize("settings", [{}, {"token_budget": 60}])
def test_recomputing_activations_changes_no_gradient(
    make_either: MakeLearner, settings: dict[str, int]
) -> None:
    batch = make_batch()
    kept = make_either(torch.float64, **settings)
    recomputing = make_either(torch.float64, gradient_checkpointing=True, **settings)
    seen: dict[str, int] = {}
    for learner in (kept, recomputing):
        calls: list[object] = []
        layer = learner.model.base_model.layers[0].mlp
        hook = layer.register_forward_pre_hook(lambda *given, calls=calls: calls.append(given[0]))
        report = learner.step(batch, psi_for(batch), lr=1e-2)
        hook.remove()
        seen[str(learner is kept)] = len(calls)
        assert report.applied
        assert not learner.model.training
        learner.logprobs(batch)  # nothing of the switch is left
    assert seen["False"] == 2 * seen["True"]
    for name, tensor in weights(kept).items():
        torch.testing.assert_close(weights(recomputing)[name], tensor, atol=1e-12, rtol=0)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"learner\.gradient_checkpointing: Linear has no layers"):
        layers_of(torch.nn.Linear(1, 1))


def short_of_memory(learner: TorchLearner, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pack of a pass does not fit, so often."""
    compute, left = learner._forward, [failures]

    def forward(pack: Pack, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        result = compute(pack, *rest)
        if left[0] and 0 in pack.index:
            left[0] -= 1
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2 GiB.\nsecond line"
            )
        return result

    monkeypatch.setattr(learner, "_forward", forward)


def test_out_of_memory_is_tried_again_with_half_the_budget(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    plain, struck = (make_learner(torch.float64, token_budget=64) for _ in range(2))
    expected = plain.step(batch, psi_for(batch), lr=1e-2)
    short_of_memory(struck, 1, monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"set learner\.token_budget = 32"):
        report = struck.step(batch, psi_for(batch), lr=1e-2)
    assert (struck.token_budget, report.metrics["memory/retries"]) == (32, 1)
    assert expected.metrics["memory/retries"] == 0
    assert report.loss == pytest.approx(expected.loss, rel=1e-10)
    for name, tensor in weights(plain).items():  # the first try's gradient is not counted twice
        torch.testing.assert_close(weights(struck)[name], tensor, atol=1e-9, rtol=0)


def test_out_of_memory_twice_is_a_sentence_and_changes_nothing(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, learner = make_batch(), make_learner(token_budget=64)
    before = weights(learner)
    short_of_memory(learner, 2, monkeypatch)
    with (
        pytest.warns(RuntimeWarning, match="ran out of memory"),
        pytest.raises(TrainingError, match=r"also .* halved to 32 \(CUDA out of memory\. Tried"),
    ):
        learner.step(batch, psi_for(batch), lr=1e-2)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_the_cpu_says_that_memory_ran_out_in_words() -> None:
    with pytest.raises(RuntimeError) as said:
        torch.empty(10**15)
    assert is_out_of_memory(said.value)
    assert not is_out_of_memory(RuntimeError("inconsistent tensor size"))


def test_an_error_that_is_not_about_memory_passes(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner()
    monkeypatch.setattr(learner, "_forward", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        learner.logprobs(make_batch())


def test_non_finite_log_probs_change_nothing(make_learner: MakeLearner) -> None:
    batch, learner = make_batch(), make_learner()
    with torch.no_grad():
        learner.model.get_output_embeddings().weight[7, 0] = math.inf
    before = weights(learner)

    def psi(logprobs: Tensor, tokens: Tensor) -> Tensor:
        raise AssertionError("psi of NaN")

    report = learner.step(batch, psi, lr=1e-2)
    assert (report.applied, math.isnan(report.loss)) == (False, True)
    assert report.logprobs.isnan().any()
    assert report.entropy is not None
    assert not report.entropy.isfinite().all()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())


def test_a_report_says_entropy_and_memory(make_learner: MakeLearner) -> None:
    batch, learner = make_batch(), make_learner()
    with torch.no_grad():
        learner.model.get_output_embeddings().weight.zero_()
    report = learner.step(batch, psi_for(batch), lr=1e-2)
    assert report.entropy is not None
    assert report.entropy.tolist() == pytest.approx([math.log(VOCABULARY)] * batch.n_tokens)
    assert 50 < report.metrics["memory/process_peak_mb"] < 100_000


def test_the_peak_of_a_process_is_not_that_of_its_parent() -> None:
    large = bytearray(b"x" * 10**9)  # what a copy of this process has before it runs the program
    code = "from agentrl.algorithms.learners.memory import process_peak; print(process_peak())"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 10**7 < int(said.stdout) < len(large)
