"""Estimates of a run before it starts: memory, from the shape of its model and the settings, and
the time of its steps. Agents are not included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
)

from agentrl.algorithms.model.attention import whole_blocks
from agentrl.algorithms.model.lm_head import MAX_LOGITS
from agentrl.algorithms.model.load import DTYPES, device_of, packs_weights
from agentrl.algorithms.preflight.duration import duration
from agentrl.base import memory as host
from agentrl.config import RunConfig, TorchLearnerConfig
from agentrl.config.infrastructure import VllmEngineConfig
from agentrl.errors import PolicyError

GIB = 2**30
USABLE_MEMORY = 0.9  # fraction of the memory
WIDTHS = {"4bit": 0.6, "8bit": 1.1}  # bytes per weight, including embeddings and scales
SERVING = 1.2  # memory of vLLM without keys and values, as a multiple of its weights
# Bytes of a process that trains, without its weights. Builds of torch differ by half a gigabyte, so
# it is what the process has now, with torch imported, and 0.1 GB that come until the first step.
LIBRARIES = max(0.45e9, host.resident() + 0.1e9)
FRAGMENTS = 0.25  # of the activations: what glibc's heap loses between them, as measured
WIDE = 4  # bytes of adapters, gradients, moments and of what is computed in float32


def process_bytes(config: RunConfig, network: Any) -> dict[str, float]:
    """Bytes by purpose of the whole algorithm process."""
    needed = {"libraries": LIBRARIES, **bytes_needed(config, network)}
    if not on_gpu(config):
        kept = WIDE * trained_weights(config, network) if config.algorithm.max_kl != 0 else 0
        needed |= {"weights to undo a step": kept, "fragments": FRAGMENTS * needed["activations"]}
    return needed


def bytes_needed(config: RunConfig, network: Any) -> dict[str, float]:
    """Bytes by purpose, for training a policy and, with the embedded engine, serving it."""
    shape, learner, engine = network.config.get_text_config(), config.learner, config.engine
    width, bits = bytes_of_weight(config), config.policy.quantize
    weights, vocabulary = network.num_parameters(), shape.vocab_size
    trained = trained_weights(config, network)
    added = seeing(config, network)[1]
    auxiliary = sum(bool(own.model) for own in (config.reference, config.teacher, config.critic))
    copies = auxiliary + (
        config.algorithm.async_sampling == "in_flight" and not config.policy.lora.rank
    )
    layer, tokens = layer_bytes(config, shape), tokens_of_pack(config, shape)
    layers, hidden = shape.num_hidden_layers, shape.hidden_size
    kept = layers * hidden * width + layer if learner.gradient_checkpointing else layers * layer
    # The engine's rows: running, idle and one of padding.
    context = whole_blocks(_context(config, shape), DTYPES[config.policy.dtype])
    cached = (2 * engine.max_batch + 1) * context
    served = engine.kind == "embedded" and config.plays_rollouts
    logits = 3 * min(MAX_LOGITS, tokens * vocabulary) + 6 * served * engine.max_batch * vocabulary
    # The gradient of a head and, if it is tied, that of the embeddings and their sum.
    head = 0 if config.policy.lora.rank else vocabulary * hidden * 3 * width
    return {
        "weights": weights * (WIDTHS[bits] if bits else width) + weights * width * copies,
        "packed weights": served * packed_bytes(config, network),
        # Gradient, two moments and, for bfloat16, a master weight, all in float32.
        "optimizer": trained * (12 if width == WIDE else 16),
        "KV cache": served * cached * bytes_of_token(config, network),
        # A chunk of logits, its softmax and gradient; the sampler's rows.
        "logits": WIDE * logits + head,
        "activations": tokens * kept,
        **added,
    }


def packed_bytes(config: RunConfig, network: Any) -> int:
    """Bytes of the second layout in which the embedded engine has weights on a CPU."""
    policy = config.policy
    if on_gpu(config) or policy.dtype != "bfloat16" or not packs_weights():
        return 0
    head = network.get_output_embeddings()
    layers = () if policy.quantize else _linear(network)
    return sum(2 * layer.in_features * layer.out_features for layer in (*layers, head))


def checkpoint_bytes(config: RunConfig, network: Any) -> float:
    """Bytes of a checkpoint: weights, two moments and, for bfloat16, master weights."""
    trained, width = trained_weights(config, network), bytes_of_weight(config)
    if config.policy.lora.rank:
        return 12 * trained
    return float(width * network.num_parameters() + (8 if width == WIDE else 12) * trained)


def trained_weights(config: RunConfig, network: Any) -> int:
    """The number of weights that an optimizer has: of the adapter, or of all that is not frozen."""
    if config.policy.lora.rank:
        return adapter_weights(config, network)
    return int(network.num_parameters() - seeing(config, network)[0])


def seeing(config: RunConfig, network: Any) -> tuple[int, dict[str, float]]:
    """What a vision tower adds: frozen weights, and bytes by purpose."""
    from agentrl.vision.memory import needed

    return needed(config, network)


def adapter_weights(config: RunConfig, network: Any) -> int:
    """The number of weights of an adapter; 0: all weights are trained."""
    sizes = sum(module.in_features + module.out_features for module in _linear(network))
    if config.learner.adapts_experts and config.engine.serves_adapted_experts:
        stacks = (p for p in network.parameters() if p.dim() == 3 and min(p.shape) > 1)
        sizes += sum(len(p) * (p.shape[1] + p.shape[2]) for p in stacks)
    return int(config.policy.lora.rank * sizes)


def _linear(network: Any) -> Iterator[Any]:
    """The linear layers of a model's text decoder, without its head and its adapters."""
    head = network.get_output_embeddings()
    for name, module in network.get_decoder().named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head and ".lora_" not in name:
            yield module


def layer_bytes(config: RunConfig, shape: Any) -> int:
    """Bytes that a layer saves for the backward pass, per token: of a Llama-like one. Two norms
    (with their float32 input), queries, keys, values and their result, and the MLP's four."""
    width, hidden = bytes_of_weight(config), int(shape.hidden_size)
    inner = int(getattr(shape, "intermediate_size", None) or 4 * hidden)
    attended = width * (3 * hidden + 2 * _key_size(shape))
    # An adapter saves the inputs of the same products; frozen norms save one less.
    inputs = width * hidden * (3 if config.policy.lora.rank else 4)
    return 2 * WIDE * hidden + attended + inputs + 4 * width * inner


def tokens_of_pack(config: RunConfig, shape: Any) -> int:
    """Tokens of the largest forward pass of an update. A row is never split."""
    budget = max(config.learner.token_budget, _context(config, shape))
    return min(budget, tokens_of_step(config, shape)) if config.plays_rollouts else budget


def tokens_of_step(config: RunConfig, shape: Any) -> int:
    """Tokens that an update reads, if rollouts of full contexts are one call."""
    algorithm, context = config.algorithm, _context(config, shape)
    answer = min(config.sampling.max_tokens or context, context)
    group = algorithm.group_size * context
    if config.learner.packed == "trie":  # the prompt is computed once
        group = context + (algorithm.group_size - 1) * answer
    return int(algorithm.groups * group / algorithm.minibatches)


def _context(config: RunConfig, shape: Any) -> int:
    longest = getattr(shape, "max_position_embeddings", None) or config.engine.max_context
    return min(config.engine.max_context, longest)


def _key_size(shape: Any) -> int:
    """Elements of the keys, and of the values, of one token in a layer."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return int(heads * size)


def bytes_of_weight(config: RunConfig) -> int:
    return 4 if config.policy.dtype == "float32" else 2


def bytes_of_token(config: RunConfig, network: Any) -> int:
    """Bytes of the keys and values of one token."""
    shape = network.config.get_text_config()
    return int(shape.num_hidden_layers * 2 * _key_size(shape) * bytes_of_weight(config))


def on_gpu(config: RunConfig) -> bool:
    return config.policy.device != "cpu" and torch.cuda.is_available()


def available(config: RunConfig) -> int:
    """Total memory of the policy's GPU, or of this machine or container, in bytes."""
    if on_gpu(config):
        return int(torch.cuda.get_device_properties(0).total_memory)
    return host.total()


def shape_of(source: str, *, local: bool = False) -> Any:
    """The model of a directory or hub name without its weights. local: do not ask the hub."""
    with torch.device("meta"):
        shape = AutoConfig.from_pretrained(source, local_files_only=local)
        looks = shape.model_type not in TEXT and shape.model_type in IMAGE_TEXT
        return (AutoModelForImageTextToText if looks else AutoModelForCausalLM).from_config(shape)


def describe(config: RunConfig, source: str) -> Iterator[str]:
    """The estimates for a model that is not loaded, with weights of 0."""
    network = shape_of(source, local=True)
    fits, sentence = memory(config, network)
    yield f"memory: about {sentence}"
    if fits:
        network = network.to(getattr(torch, config.policy.dtype)).eval()
        network = network.to_empty(device=device_of(config.policy.device))
        for each in (*network.parameters(), *network.buffers()):  # memory may hold anything
            each.detach().zero_()
        yield from duration(config, network)


def memory(config: RunConfig, network: Any) -> tuple[bool, str]:
    """Whether memory suffices, and a sentence with its parts and, if not, the remedy."""
    usable, parts = USABLE_MEMORY * available(config), process_bytes(config, network)
    shown = ", ".join(f"{name} {size / GIB:.2g}" for name, size in parts.items())
    sentence = f"{sum(parts.values()) / GIB:.2g} of {usable / GIB:.2g} GiB: {shown}"
    if sum(parts.values()) > usable:
        return False, f"{sentence}; {host.CURE}"
    if torch.cuda.is_available() and isinstance(config.engine, VllmEngineConfig):
        total = available(config)
        share = config.engine.vllm.gpu_memory or vllm_share(config, network, total)
        sentence += f", {config.engine.kind} {share * total / GIB:.2g}"
    return True, f"{sentence}; a checkpoint {checkpoint_bytes(config, network) / GIB:.2g} of disk"


def vllm_share(config: RunConfig, network: Any, total: int) -> float:
    """The fraction of a GPU of `total` bytes that the learner of `network` leaves to vLLM. If vLLM
    sleeps during updates, memory that only updates need counts as free.

    Raises PolicyError if that is too little for the weights and one call."""
    engine = config.engine
    assert isinstance(engine, VllmEngineConfig)
    needs = bytes_needed(config, network)
    if engine.vllm.sleep:
        del needs["activations"], needs["logits"]
        if isinstance(config.learner, TorchLearnerConfig) and config.learner.offload:
            del needs["optimizer"]
    left = USABLE_MEMORY * total - sum(needs.values())
    served = SERVING * network.num_parameters() * bytes_of_weight(config)
    least = served + engine.max_context * bytes_of_token(config, network)
    if left < least:
        shown = ", ".join(f"{name} {size / GIB:.2g}" for name, size in needs.items() if size)
        raise PolicyError(
            f"vLLM needs {least / GIB:.2g} GiB of the learner's GPU for weights and one call, and "
            f"{max(left, 0) / GIB:.2g} of {total / GIB:.2g} are left (the learner: {shown}); set "
            "engine.vllm.sleep=1 and learner.offload=true, policy.lora.rank, a smaller "
            "learner.token_budget or engine.max_context, or engine.vllm.gpu_memory yourself"
        )
    return left / total
