"""Verifies before serving that the engine samples with the model's own log-probs.

On a small copy of the model (see `model.scaled`) it answers calls of unequal length, in a batch and
alone, with prefixes copied from each other, beyond every window of the copy. Each token's log-prob
is compared with the model's own forward pass over prompt and answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.engines.embedded.attention import GenerationRequest, TokenUpdate
from agentrl.algorithms.engines.embedded.engine import Engine, EngineWay, TokenUpdates, sentence_of
from agentrl.algorithms.model.attention import context_length, longrope_threshold
from agentrl.algorithms.model.forward import TOLERANCE, incompatibility
from agentrl.algorithms.model.lm_head import computing_with
from agentrl.algorithms.model.load import Model
from agentrl.algorithms.model.scaled import ScalingError, attempt, copy_key, inputs_of, scaled_copy
from agentrl.core.errors import PolicyError
from agentrl.core.processes import log_phase
from agentrl.core.types import Sampling

log = logging.getLogger("agentrl.algorithm")
PROMPTS = ((28, 12), (28, 5), (20, 20), (0, 6))  # (tokens of a shared prefix, tokens after it)
ANSWER = 14  # tokens
SENTENCES = {
    "cached": "calls are answered one at a time, each with the model's own cache, which is slow",
    "whole": "calls are answered one at a time and each token reads the whole call again, which is "
    "very slow",
}


def served_context(model: Model, requested: int) -> int:
    """The maximum tokens of a call: `requested`, limited by the model's context. A longrope model
    serves only sequences below its threshold: a call that grows beyond it would be sampled with
    other rotary frequencies than it is trained with."""
    limits = requested, context_length(model) or requested, longrope_threshold(model) or requested
    return min(limits)


def supported_way(model: Model) -> EngineWay:
    """The fastest way to sample with the model's own log-probs; logs the choice and its reason.
    Raises PolicyError if there is none."""
    way, reason = prove_engine(model)
    name = repr(model.config.model_type)  # type: ignore[union-attr]
    if (end := longrope_threshold(model)) and end < (context_length(model) or end):
        log.warning(
            "model type %s rotates calls of more than %d tokens otherwise, so the embedded policy "
            "server takes at most that many, of prompt and answer; engine.kind = 'vllm' takes more",
            name, end,
        )  # fmt: skip
    if way == "batched":
        log_phase(log, f"model type {name} is sampled in batches: {reason}")
    else:
        log.warning("model type %s %s, so %s", name, reason, SENTENCES[way])
    return way


_ways: dict[object, tuple[EngineWay, str] | PolicyError] = {}


def prove_engine(model: PreTrainedModel) -> tuple[EngineWay, str]:
    """The fastest correct way and the reason for the choice, computed once per configuration and
    process. Raises PolicyError as `supported_way`."""
    key = (copy_key(model), incompatibility(model))
    if key not in _ways:
        with computing_with(1):
            _ways[key] = _proof(model)
    proof = _ways[key]
    if isinstance(proof, PolicyError):
        raise proof
    return proof


def _proof(model: PreTrainedModel) -> tuple[EngineWay, str] | PolicyError:
    images = inputs_of(model) is not None
    reason, ways = incompatibility(model) or "", list[EngineWay](("cached", "whole"))
    if not reason:
        ways.insert(0, "batched")
    try:
        attempt(lambda: scaled_copy(model))
    except ScalingError as error:
        return "whole", f"has no small copy to compare with ({error})"
    for way in ways[:1] if images else ways:
        try:
            gap, answered = sampling_gap(scaled_copy(model), way)
        except Exception as error:  # noqa: BLE001  a model fails in its own way
            why = f"cannot be computed {WORDS[way]} ({sentence_of(error)})"
        else:
            if answered and gap <= TOLERANCE:
                first = f"a small copy's log-probs are within {gap:.1g} of its own forward pass"
                return way, reason or first
            why = f"differs from its own forward pass by {gap:.1g} nats {WORDS[way]}"
        reason = f"{reason}, {why}" if reason else why
    return PolicyError(
        f"model type {model.config.model_type!r} {reason}, so the embedded policy server cannot "
        "serve it; choose another model, or engine.kind = 'vllm' if vLLM has it"
    )


WORDS: dict[EngineWay, str] = {
    "batched": "in batches", "cached": "with its own cache", "whole": "without a cache",
}  # fmt: skip


def sampling_gap(copy: PreTrainedModel, way: EngineWay) -> tuple[float, bool]:
    """The largest difference of a sampled token's log-prob from the model's own forward pass over
    its call, NaN counting as infinite; and whether all calls were answered."""
    answers: dict[int, TokenUpdate] = {}

    def deliver(updates: TokenUpdates) -> None:
        answers.update({id(call): update for call, update in updates if update.finish})

    longest = served_context(copy, 64)
    engine = Engine(
        copy, eos=(), max_batch=3, max_context=longest, threads=1, deliver=deliver, way=way
    )
    calls = _calls(longest)
    with torch.inference_mode():
        for group in (calls[:1], calls[1:]):  # the first call alone, then as a prefix of others
            engine.waiting.extend(group)
            while engine.waiting or engine.rows.n:
                engine.compute_step()
    gap = 0.0
    for call in calls:
        update = answers[id(call)]
        if update.finish == "error":
            raise PolicyError(update.error.removeprefix("the model failed: "))
        exact = _own_logprobs(copy, call.prompt.tolist(), update.tokens)
        difference = float((torch.tensor(update.logprobs) - exact).abs().max())
        gap = max(gap, math.inf if math.isnan(difference) else difference)
    return gap, len(answers) == len(calls)


def _calls(longest: int) -> list[GenerationRequest]:
    draw = np.random.default_rng(0)
    text = draw.integers(4, 60, 64)
    calls = []
    for index, (shared, separate) in enumerate(PROMPTS):
        prompt = np.concatenate([text[:shared], draw.integers(4, 60, separate)])
        prompt = prompt[: longest - ANSWER // 2].astype(np.int32)
        sampling = Sampling(max_tokens=min(ANSWER, longest - len(prompt)))
        calls.append(GenerationRequest(prompt, sampling, seed=index, receive=lambda update: None))
    return calls


@torch.no_grad()
def _own_logprobs(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    logprobs = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float().log_softmax(-1)
    of_answer: Tensor = logprobs[len(prompt) - 1 :].gather(1, ids[0, len(prompt) :, None])[:, 0]
    return of_answer
