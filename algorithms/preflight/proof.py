"""Compare, on this hardware, log-probs and gradients of branches packed as a trie and as rows.

In float32 both must be equal but for the order of sums. In bfloat16 a real model's log-probs move
by some tenths with any change of that order, so there both are compared with float32: the trie may
be hardly further from it than rows are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model.forward import forward_logprobs, incompatibility
from agentrl.algorithms.model.inputs import inputs_of
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.packing import Packing, pack_rows
from agentrl.base import memory
from agentrl.config import PolicyConfig

QUESTION = (
    "A shop sells a lamp for 48 dollars and a chair for 31 dollars. What do both cost together? "
    "Answer in one short sentence, and say how you found it."
)
ANSWERS = (
    "Both cost 79 dollars together, because 48 and 31 are 79.",
    "You pay 79 dollars for the two of them: I added the prices.",
    "I do not know what the chair costs, so please ask the shop about it.",
    "48 + 31 = 79, so the lamp and the chair cost 79 dollars.",
)
PROMPT_TOKENS, ANSWER_TOKENS = 48, 12  # at most, the prompt's last and the answers' first ones
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of log-probs
QUANTIZED = {"4bit": 0.1, "8bit": 0.2}  # their kernels round, and 8bit depends on the batch
# How many times as far from float32 as rows a trie may be. SmolLM2-135M: 1.0 to 1.2; with one
# branch a position off: 4.
FACTOR = 1.5


class TrieGap(NamedTuple):
    """The largest difference of log-probs, and the relative difference of the gradients; NaN if the
    computation failed, with the reason."""

    logprobs: float
    gradient: float
    reason: str = ""
    distance: float | None = None  # the trie's from float32, in that of rows; None: not measured

    def __str__(self) -> str:
        differences = f"{self.logprobs:.1g} and gradients within {self.gradient:.1g}"
        sentence = f"log-probs within {differences} of separate rows"
        if self.distance is not None:
            sentence += f", {self.distance:.2g} times as far from float32 as these"
        return self.reason or sentence

    def within(self, policy: PolicyConfig) -> bool:
        """Whether the gap is within the tolerance of this policy."""
        if self.distance is not None:
            return self.distance <= FACTOR
        allowed = tolerance(policy)
        return self.logprobs <= allowed and self.gradient <= 10 * allowed


def tolerance(policy: PolicyConfig) -> float:
    """Largest acceptable difference of a policy's log-probs between two ways to compute them."""
    return max(TOLERANCE[policy.dtype], QUANTIZED.get(policy.quantize, 0.0))


def trie_gap(model: PreTrainedModel, tokenizer: Tokenizer) -> TrieGap | None:
    """Difference between trie and rows for answers to one prompt; None if `model` has no tries."""
    if incompatibility(model):
        return None
    rows = _rows(model, tokenizer)
    try:
        trie, separate = (_computed(model, rows, packing) for packing in ("trie", "rows"))
        distance = _distance(model, rows, trie, separate)
    except RuntimeError as error:  # a kernel that this hardware lacks
        return TrieGap(torch.nan, torch.nan, str(error).splitlines()[0])
    largest = float((trie.logprobs - separate.logprobs).abs().max())
    return TrieGap(largest, _relative(trie, separate), "", distance)


def one_row(tokens: list[int], prompt: int) -> TokenRow:
    """A row whose first `prompt` tokens are context and whose other tokens are actions."""
    actions = torch.arange(prompt, len(tokens))
    ones = torch.ones(len(actions))
    return TokenRow(torch.tensor(tokens), actions, ones, ones, torch.zeros_like(actions))


class Computed(NamedTuple):
    logprobs: Tensor  # float32 [n]
    gradient: Tensor  # float32, of their sum at the embeddings, which all layers affect


def _rows(model: PreTrainedModel, tokenizer: Tokenizer) -> list[TokenRow]:
    """The answers to the prompt, in tokens of the model."""
    size = len(model.get_input_embeddings().weight)
    chat: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    inputs = inputs_of(model)
    prompt = inputs.prompt(tokenizer) if inputs else []
    if not prompt:
        try:
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], **chat)
        except (TemplateError, ValueError):  # no template, or one for other conversations
            prompt = tokenizer(QUESTION)["input_ids"]
        prompt = [token % size for token in prompt[-PROMPT_TOKENS:]]
    answers = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ANSWERS)
    answers = ([token % size for token in answer[:ANSWER_TOKENS]] for answer in answers)
    return [one_row(prompt + answer, len(prompt)) for answer in answers]


def _computed(model: PreTrainedModel, rows: list[TokenRow], packing: Packing) -> Computed:
    (pack,), weight = pack_rows(rows, packing, 10**6), model.get_input_embeddings().weight
    before, weight.requires_grad = weight.requires_grad, True  # adapters freeze it
    try:
        logprobs = forward_logprobs(model, pack)
        (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    finally:
        weight.requires_grad = before
    return Computed(logprobs.detach()[pack.index.argsort()].float(), gradient.float())


def _distance(
    model: PreTrainedModel, rows: list[TokenRow], trie: Computed, separate: Computed
) -> float | None:
    """How many times as far from rows in float32 a trie is as rows, by log-probs or gradients,
    whichever is more. None: it is not compared, because the weights are float32 or quantized.

    On a CPU both packings have the same masks in float32, where rounding hides no wrong one.
    Where there is no room for float32 weights, both are instead compared with rows one at a time,
    whose sums have another order too, and no less than the tolerance is allowed."""
    if model.dtype == torch.float32 or getattr(model, "hf_quantizer", None) is not None:
        return None
    masks = 0.0
    if 4 * model.num_parameters() <= _free(model.device) / 2:
        with _widened(model):
            exact = _computed(model, rows, "rows")
            if model.device.type == "cpu":  # a GPU's kernel may have no room for float32
                wide = _computed(model, rows, "trie").logprobs - exact.logprobs
                masks = FACTOR * float(wide.abs().max()) / TOLERANCE["float32"]
        least, least_gradient = TOLERANCE["float32"], 10 * TOLERANCE["float32"]
    else:
        alone = [_computed(model, [row], "rows") for row in rows]
        gradient = torch.stack([x.gradient for x in alone]).sum(0)
        exact = Computed(torch.cat([x.logprobs for x in alone]), gradient)
        least = least_gradient = TOLERANCE["bfloat16"]
    found, usual = (
        torch.tensor([_spread(each.logprobs - exact.logprobs), _relative(each, exact)])
        for each in (trie, separate)
    )
    ratios = found / usual.clamp(min=torch.tensor([least, least_gradient]))
    return float(torch.cat([ratios, torch.tensor([masks])]).max())  # NaN if one is


def _spread(differences: Tensor) -> float:
    return float(differences.square().mean().sqrt())


def _relative(found: Computed, wanted: Computed) -> float:
    return float((found.gradient - wanted.gradient).norm() / wanted.gradient.norm())


@contextmanager
def _widened(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model has its weights in float32."""
    kept = [(weight, weight.data) for weight in model.parameters()]
    try:
        for weight, data in kept:
            weight.data = data.float()
        yield
    finally:
        for weight, data in kept:
            weight.data = data


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.free()
