"""Checks a run's packing on this hardware before the first step, by comparing log-probs and
gradients of branches packed as a trie and as rows; and prints the estimates on the console.

In float32 both must be equal except for the order of sums. In bfloat16 any change of that order
moves a real model's log-probs by some tenths, so both are compared with float32: the trie's
distance from it may be only slightly larger than that of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms import estimate
from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.estimate import duration
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.forward import forward_logprobs, incompatibility
from agentrl.algorithms.model.packing import Packing, pack_rows
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.core import processes
from agentrl.core.config import PolicyConfig, RunConfig
from agentrl.core.config.derived import trained_policies, view
from agentrl.core.errors import PolicyError
from agentrl.core.processes import log_phase
from agentrl.core.types import Group

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
# Maximum tokens: the last of the prompt and the first of the answers.
PROMPT_TOKENS, ANSWER_TOKENS = 48, 12
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # allowed difference of log-probs
QUANTIZED = {"4bit": 0.1, "8bit": 0.2}  # quantised kernels round; 8bit also depends on the batch
# Allowed distance of a trie from float32, relative to that of rows. SmolLM2-135M: 1.0 to 1.2; with
# one branch shifted by a position: 4.
FACTOR = 1.5


class TrieGap(NamedTuple):
    """The largest difference of log-probs, and the relative difference of the gradients; NaN if the
    computation failed, with the reason."""

    logprobs: float
    gradient: float
    reason: str = ""
    # The trie's distance from float32 relative to that of rows; None: not measured.
    distance: float | None = None

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
        except (TemplateError, ValueError):  # no template, or one that rejects this conversation
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
    """The distance of a trie from rows in float32, relative to that of rows, by log-probs or
    gradients, whichever is larger. None: not compared, because the weights are float32 or
    quantized. On a CPU both packings have the same masks in float32, where rounding cannot hide a
    wrong mask. Without memory for float32 weights, both are compared with single rows instead,
    whose sums also have another order, and at least the tolerance is allowed."""
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
    distances, usual = (
        torch.tensor([_spread(computed.logprobs - exact.logprobs), _relative(computed, exact)])
        for computed in (trie, separate)
    )
    ratios = distances / usual.clamp(min=torch.tensor([least, least_gradient]))
    return float(torch.cat([ratios, torch.tensor([masks])]).max())  # NaN if any is


def _spread(differences: Tensor) -> float:
    return float(differences.square().mean().sqrt())


def _relative(computed: Computed, wanted: Computed) -> float:
    return float((computed.gradient - wanted.gradient).norm() / wanted.gradient.norm())


@contextmanager
def _widened(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model has its weights in float32."""
    weights = [(weight, weight.data) for weight in model.parameters()]
    try:
        for weight, data in weights:
            weight.data = data.float()
        yield
    finally:
        for weight, data in weights:
            weight.data = data


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else processes.free_memory()


log = logging.getLogger("agentrl.algorithm")


def announce(config: RunConfig, models: Sequence[LoadedModel], finished: int = 0) -> None:
    """Log the estimates of a run that is about to train, as a warning if memory is too small. done:
    finished steps."""
    for settings, model in _learning(config, models):
        fits, sentence = estimate.memory(settings, model.model)
        if fits:
            log_phase(log, f"memory: at most {sentence.partition(':')[0]}")
        (log.info if fits else log.warning)("memory: at most %s", sentence)
        for line in duration(settings, model.model, finished):
            log_phase(log, line)


def announce_tried(
    config: RunConfig, models: Sequence[LoadedModel], groups: Sequence[Group]
) -> None:
    """Log the memory that contexts as in the first step's rollouts need."""
    for settings, model in _learning(config, models):
        if sentence := estimate.tried(settings, model.model, groups):
            log_phase(log, f"memory: {sentence}")


def _learning(
    config: RunConfig, models: Sequence[LoadedModel]
) -> Iterator[tuple[RunConfig, LoadedModel]]:
    """The models that learn, each with the view of its first policy that does."""
    learning = trained_policies(config) if config.steps and config.learner.kind == "torch" else []
    for model in (
        candidate for candidate in models if set(candidate.policies).intersection(learning)
    ):
        yield view(config, next(name for name in model.policies if name in learning)), model


def with_proven_packing(config: RunConfig, models: Sequence[LoadedModel]) -> RunConfig:
    """The settings, with packing = "rows" if trie packing gives wrong log-probs on this hardware.
    Raises PolicyError then if the run file sets "trie"."""
    if config.learner.kind != "torch" or config.learner.packed == "rows":
        return config
    trained = set(trained_policies(config))
    for model in models:
        gap = trie_gap(model.model, model.tokenizer) if set(model.policies) & trained else None
        if gap is None or gap.within(config.policy):
            continue
        if config.learner.packing == "trie":
            raise PolicyError(f"learner.packing = 'trie' differs here: {gap}; set it to 'rows'")
        log.warning("Prefixes are not packed on this hardware (learner.packing = rows): %s.", gap)
        return replace(config, learner=replace(config.learner, packing="rows"))
    return config


def forecast(config: RunConfig) -> list[str]:
    """The estimates for the models of a run file, which are not loaded."""
    if config.learner.kind != "torch":
        return []
    lines: list[str] = []
    views = (view(config, name) for name in trained_policies(config))
    for source, settings in {
        policy_view.model_path(): policy_view for policy_view in views
    }.items():
        if settings.policy.build and not Path(source or "?").is_dir():
            return ["memory and time are estimated at the start of the run, after policy.build"]
        try:
            lines += estimate.describe(settings, source) if source else []
        except (OSError, ValueError):  # it is on the hub
            lines.append(f"memory and time of {source} are unknown; agentrl doctor asks the hub")
    return lines
