"""Estimates of a run before it starts: its memory, from the shape of its model and the settings,
and the time of its steps, measured with its model on this machine. Agents are not included.

The time is based on the policy server's decoding, with all calls and with one, and on a forward
pass. The memory of images assumes contexts full of distinct images, up to the limits of the caches,
each as large as a screenshot, and that the tower reads one image at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from msgspec import structs
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT,
)

from agentrl.algorithms.engines.embedded.attention import GenerationRequest
from agentrl.algorithms.engines.embedded.engine import Engine, TokenUpdates
from agentrl.algorithms.model.attention import whole_blocks
from agentrl.algorithms.model.lm_head import MAX_LOGITS, computing_with
from agentrl.algorithms.model.load import DTYPES, device_of
from agentrl.algorithms.model.packing import MIN_PACK
from agentrl.algorithms.model.products import has_kernels
from agentrl.algorithms.simulation import Simulation, Workload
from agentrl.algorithms.vision.images import PIXEL_BYTES
from agentrl.algorithms.vision.inputs import CLASSES, EMBEDDING_BYTES
from agentrl.core import processes as host
from agentrl.core.config import RunConfig, TorchLearnerConfig
from agentrl.core.config.infrastructure import VllmEngineConfig
from agentrl.core.config.run_file import tasks_of
from agentrl.core.errors import PolicyError
from agentrl.core.files import duration_text
from agentrl.core.types import Group, Sampling

SCREEN = 1280 * 800  # pixels


def needed(config: RunConfig, network: Any) -> tuple[int, dict[str, float]]:
    """The weights of a frozen vision tower, and bytes by purpose; nothing for a text model."""

    shape = network.config
    if shape.model_type not in CLASSES:
        return 0, {}
    trained, sees = config.policy.vision == "trained", bool(config.policy.vision)
    kind = CLASSES[shape.model_type](network)
    frozen = sum(
        weight.numel()
        for part in (kind.unused if trained else kind.towers)
        for weight in part.parameters()
    )
    if not sees:
        return frozen, {}
    vision, text = shape.vision_config, shape.get_text_config()
    width, merged = bytes_of_weight(config), getattr(vision, "spatial_merge_size", 1) ** 2
    tokens = tokens_of_step(config, text)
    deep = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    embeddings = min(EMBEDDING_BYTES, tokens * text.hidden_size * deep * width)
    patch = 3 * vision.patch_size**2 * getattr(vision, "temporal_patch_size", 1)
    pixels = 0 if on_gpu(config) else min(PIXEL_BYTES, tokens * merged * patch * WIDE)
    size = getattr(vision, "image_size", None)  # LLaVA's tokens do not depend on the image's size
    screen = (size * size if isinstance(size, int) else SCREEN) // vision.patch_size**2
    patches = min(max(config.learner.token_budget, screen), tokens * merged)
    return frozen, {
        # The engine has its own copy of a trained tower.
        "image embeddings": embeddings * (1 + (trained and config.engine.kind == "embedded")),
        "image pixels": pixels,
        "vision tower": patches * tower_bytes(config, vision, trained=trained),
    }


def tower_bytes(config: RunConfig, vision: Any, *, trained: bool) -> int:
    """Bytes that the tower needs per patch: of a layer, or of all that a backward pass reads."""

    width, hidden = bytes_of_weight(config), int(vision.hidden_size)
    layers = int(getattr(vision, "num_hidden_layers", None) or vision.depth)
    inner = int(vision.intermediate_size)
    # Two norms with their float32 input, queries, keys, values and their result, the MLP's four.
    layer = 2 * WIDE * hidden + width * (9 * hidden + 4 * inner)
    if not trained:
        return layer
    if config.learner.gradient_checkpointing:
        return layers * hidden * width + layer
    return layers * layer


DECODED = 4  # measured decoding steps
MEASURED_TOKENS = 128  # tokens of the measured forward pass
# Seconds that client, gateway and store take for a call, measured on two cores.
HANDLING_SECONDS = 0.006


def duration(config: RunConfig, network: Any, done: int = 0) -> Iterator[str]:
    """A sentence with the time of the steps that remain after `done`, if each rollout is one
    call."""
    algorithm, runner = config.algorithm, config.runner
    if not config.plays_rollouts or config.engine.kind != "embedded":
        engine = f"engine.kind = {config.engine.kind!r}"
        subject = engine if config.plays_rollouts else "a run without rollouts"
        yield f"time: not estimated for {subject}; the first steps will tell"
        return
    rollouts = algorithm.groups * algorithm.group_size
    slots = min(runner.processes * runner.concurrency or rollouts, rollouts)
    rows = max(2, min(config.engine.max_batch, slots))
    tokens = config.sampling.max_tokens or config.engine.max_context
    step_of_one, step_of_many = seconds_of(network, 1, 1), seconds_of(network, rows, 1)
    per_call = max(0.0, step_of_many - step_of_one) / (rows - 1)
    # Forward and backward.
    passes = algorithm.epochs * (4 if config.learner.gradient_checkpointing else 3)
    # A prompt is computed once for the rollouts of its group, where they are packed as a trie.
    prompts = algorithm.groups if config.learner.packed == "trie" else rollouts
    work = Workload(
        groups=algorithm.groups,
        group_size=algorithm.group_size,
        slots=slots,
        calls=1,
        tokens=tokens,
        decode=step_of_one,
        per_call=per_call,
        prompt=HANDLING_SECONDS,
        update=seconds_of(network, 1, MEASURED_TOKENS)
        / MEASURED_TOKENS
        * passes
        * (rollouts * tokens + prompts * prompt_tokens(config, network)),
    )
    in_flight = algorithm.samples_during_update
    step = Simulation(work, algorithm.max_staleness, in_flight=in_flight).run(steps=5).seconds
    ahead = max(config.steps - done, 0)
    steps = f"the {ahead} steps that are left" if done else f"{ahead} steps"
    yield (
        f"time: about {_roughly(step)} a step, {_roughly(step * ahead)} for {steps}, if a rollout "
        f"is one call of {tokens} tokens; more calls, long prompts and tools add to it"
    )


def _roughly(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 99.5 else duration_text(seconds)


def prompt_tokens(config: RunConfig, network: Any) -> int:
    """Tokens of the first training task's input; 0 if there is none."""
    if not config.tasks.train:
        return 0
    task = tasks_of(config, "train")[0]
    tokenizer = AutoTokenizer.from_pretrained(network.name_or_path)
    return len(tokenizer(str(task.get("input", "")))["input_ids"])


@torch.no_grad()
def seconds_of(network: Any, rows: int, tokens: int) -> float:
    """Seconds of the fastest of four forward passes, two of them with one thread, which suits small
    models; only one pass if it takes more than a second. For one token: of as many decoding steps
    of the policy server, with sampling."""
    if tokens == 1:
        return decoding(network, rows)
    ids, times = torch.zeros((rows, tokens), dtype=torch.long, device=network.device), []
    for threads in (*(torch.get_num_threads(),) * 2, 1, 1):
        with computing_with(threads):
            started, computed = _unloaded(), time.process_time()
            network(input_ids=ids, use_cache=False).logits[0, 0, 0].item()  # waits for a GPU
            times.append(_unloaded() - started)
            if ids.device.type == "cpu":  # this thread may wait for others, which wait for cores
                computed = time.process_time() - computed
                times[-1] = min(times[-1], computed / torch.get_num_threads())
        if times[0] > 1:
            break
    return min(times)


SCHEDULER = Path("/proc/thread-self/schedstat")  # ns of this thread: running, waiting for a core


def _unloaded() -> float:
    """The time in seconds, minus the time for which this thread waited for a busy core."""
    try:
        waited = int(SCHEDULER.read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        waited = 0
    return time.perf_counter() - waited / 1e9


def decoding(network: Any, rows: int) -> float:
    """Seconds of the fastest decoding step of `rows` calls, with one thread. Raises PolicyError for
    a model that the policy server cannot run."""
    steps: SimpleQueue[tuple[float, str]] = SimpleQueue()

    def deliver(updates: TokenUpdates) -> None:
        steps.put((_unloaded(), updates[0][1].error))  # CPU time of the engine's thread

    engine = Engine(network, eos=[], max_batch=rows, max_context=64, threads=1, deliver=deliver)
    sampling, prompt = Sampling(max_tokens=1 + DECODED), np.zeros(2, np.int32)
    for seed in range(rows):  # before the start, so that all begin in one step
        engine.submit(GenerationRequest(prompt, sampling, seed, lambda update: None, stream=True))
    threads, ended = torch.get_num_threads(), list[float]()
    engine.start()
    try:
        while len(ended) <= DECODED:
            at, error = steps.get()
            if error:
                raise PolicyError(f"{network.name_or_path}: {error}")
            ended.append(at)
    finally:
        engine.close()
        torch.set_num_threads(threads)  # the engine sets them for the process
    return min(after - before for before, after in pairwise(ended))


GIB = 2**30
USABLE_MEMORY = 0.9  # fraction of the memory
WIDTHS = {"4bit": 0.6, "8bit": 1.1}  # bytes per weight, including embeddings and scales
SERVING = 1.2  # vLLM's memory without the KV cache, as a multiple of its weights
# Bytes of a training process without weights. Builds of torch differ by half a gigabyte, so it is
# the current size of this process, which has imported torch, plus 0.1 GB that are allocated until
# the first step.
LIBRARIES = max(0.45e9, host.resident_bytes() + 0.1e9)
FRAGMENTS = 0.25  # share of the activations that glibc's heap loses by fragmentation, as measured
WIDE = 4  # bytes per element of adapters, gradients, moments and float32 intermediates


def process_bytes(config: RunConfig, network: Any) -> dict[str, float]:
    """Bytes by purpose of the whole algorithm process."""
    needed = {"libraries": LIBRARIES, **bytes_needed(config, network)}
    if not on_gpu(config):
        undo_bytes = WIDE * trained_weights(config, network) if config.algorithm.max_kl != 0 else 0
        needed |= {
            "weights to undo a step": undo_bytes,
            "fragments": FRAGMENTS * needed["activations"],
        }
    return needed


def bytes_needed(config: RunConfig, network: Any) -> dict[str, float]:
    """Bytes by purpose, for training a policy and, with the embedded engine, serving it."""
    shape, learner, engine = network.config.get_text_config(), config.learner, config.engine
    width, bits = bytes_of_weight(config), config.policy.quantize
    weights, vocabulary = network.num_parameters(), shape.vocab_size
    trained = trained_weights(config, network)
    added = seeing(config, network)[1]
    auxiliary = sum(
        bool(settings.model) for settings in (config.reference, config.teacher, config.critic)
    )
    copies = auxiliary + (
        config.algorithm.async_sampling == "in_flight" and not config.policy.lora.rank
    )
    layer, tokens = layer_bytes(config, shape), tokens_of_pack(config, shape)
    layers, hidden = shape.num_hidden_layers, shape.hidden_size
    saved_bytes = (
        layers * hidden * width + layer if learner.gradient_checkpointing else layers * layer
    )
    # The engine's rows: running, idle, and one row of padding. A CPU has only what is written.
    context = _context(config, shape)
    if on_gpu(config):
        context = whole_blocks(context, DTYPES[config.policy.dtype])
    cached = (2 * engine.max_batch + 1) * context
    served = engine.kind == "embedded" and config.plays_rollouts
    logits = 3 * min(MAX_LOGITS, tokens * vocabulary) + 6 * served * engine.max_batch * vocabulary
    # The gradient of the head and, if it is tied, that of the embeddings and their sum.
    head = 0 if config.policy.lora.rank else vocabulary * hidden * 3 * width
    return {
        "weights": weights * (WIDTHS[bits] if bits else width) + weights * width * copies,
        "packed weights": served * packed_bytes(config, network),
        # Gradient, two moments and, for bfloat16, a master weight, all in float32.
        "optimizer": trained * (12 if width == WIDE else 16),
        "KV cache": served * cached * bytes_of_token(config, network),
        # A chunk of logits, its softmax and gradient; the sampler's rows.
        "logits": WIDE * logits + head,
        "activations": tokens * saved_bytes,
        **added,
    }


def packed_bytes(config: RunConfig, network: Any) -> int:
    """Bytes of the second layout in which the embedded engine has weights on a CPU."""
    policy = config.policy
    if on_gpu(config) or policy.dtype != "bfloat16" or not has_kernels():
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
    """The memory of a vision tower: frozen weights, and bytes by purpose."""

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
    """Bytes per token that a Llama-like layer saves for the backward pass: two norms (with float32
    inputs), queries, keys, values and their result, and the MLP's four."""
    width, hidden = bytes_of_weight(config), int(shape.hidden_size)
    inner = int(getattr(shape, "intermediate_size", None) or 4 * hidden)
    attended = width * (3 * hidden + 2 * _key_size(shape))
    # An adapter saves the inputs of the same products; frozen norms save one tensor less.
    inputs = width * hidden * (3 if config.policy.lora.rank else 4)
    return 2 * WIDE * hidden + attended + inputs + 4 * width * inner


def tokens_of_pack(config: RunConfig, shape: Any) -> int:
    """Tokens of the largest forward pass of an update. A row is never split, and on a CPU there is
    a pass for each group (`packing.small_ranges`)."""
    longest = _context(config, shape)
    budget = max(config.learner.token_budget, longest)
    if not config.plays_rollouts:
        return budget
    group = tokens_of_group(config, shape)
    if on_gpu(config):
        return min(budget, tokens_of_step(config, shape))
    return min(budget, max(MIN_PACK, group if config.learner.packed == "trie" else longest))


def tokens_of_step(config: RunConfig, shape: Any) -> int:
    """Tokens that an update reads, if rollouts of full contexts are one call."""
    algorithm = config.algorithm
    return int(algorithm.groups * tokens_of_group(config, shape) / algorithm.minibatches)


def tokens_of_group(config: RunConfig, shape: Any) -> int:
    """Tokens of a group that an update reads, if rollouts of full contexts are one call."""
    algorithm, context = config.algorithm, _context(config, shape)
    answer = min(config.sampling.max_tokens or context, context)
    if config.learner.packed == "trie":  # a group's prompt is computed once
        return context + (algorithm.group_size - 1) * answer
    return algorithm.group_size * context


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
    return host.total_memory()


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
    yield f"memory: at most {sentence}"
    if fits:
        network = network.to(getattr(torch, config.policy.dtype)).eval()
        network = network.to_empty(device=device_of(config.policy.device))
        for tensor in (*network.parameters(), *network.buffers()):  # memory may hold anything
            tensor.detach().zero_()
        yield from duration(config, network)


def memory(config: RunConfig, network: Any) -> tuple[bool, str]:
    """Whether memory suffices, and a sentence with its parts and, if not, the remedy."""
    usable, parts = USABLE_MEMORY * available(config), process_bytes(config, network)
    shown = ", ".join(f"{name} {size / GIB:.2g}" for name, size in parts.items())
    sentence = f"{sum(parts.values()) / GIB:.2g} of {usable / GIB:.2g} GiB: {shown}"
    if sum(parts.values()) > usable:
        return False, f"{sentence}; {host.LEARNER_MEMORY_HINT}"
    if torch.cuda.is_available() and isinstance(config.engine, VllmEngineConfig):
        total = available(config)
        share = config.engine.vllm.gpu_memory or vllm_share(config, network, total)
        sentence += f", {config.engine.kind} {share * total / GIB:.2g}"
    return True, f"{sentence}; a checkpoint {checkpoint_bytes(config, network) / GIB:.2g} of disk"


def tried(config: RunConfig, network: Any, groups: Sequence[Group]) -> str:
    """A sentence: memory and time for contexts like the longest of these rollouts, besides the
    upper bound; empty without calls."""
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    calls = [len(call.prompt) + len(call.completion) for r in rollouts for call in r.transitions]
    if not calls:
        return ""
    engine = structs.replace(config.engine, max_context=max(calls))
    as_tried, bound = (
        sum(process_bytes(settings, network).values()) / GIB
        for settings in (structs.replace(config, engine=engine), config)
    )
    return (
        f"about {as_tried:.2g} GiB as tried (contexts of {max(calls)} tokens), at most {bound:.2g} "
        "if every context fills"
    )


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
    free = USABLE_MEMORY * total - sum(needs.values())
    served = SERVING * network.num_parameters() * bytes_of_weight(config)
    least = served + engine.max_context * bytes_of_token(config, network)
    if free < least:
        shown = ", ".join(f"{name} {size / GIB:.2g}" for name, size in needs.items() if size)
        raise PolicyError(
            f"vLLM needs {least / GIB:.2g} GiB of the learner's GPU for weights and one call, and "
            f"{max(free, 0) / GIB:.2g} of {total / GIB:.2g} are left (the learner: {shown}); set "
            "engine.vllm.sleep=1 and learner.offload=true, policy.lora.rank, a smaller "
            "learner.token_budget or engine.max_context, or engine.vllm.gpu_memory yourself"
        )
    return free / total
