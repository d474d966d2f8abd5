"""What a run will need, before it begins: memory by the shape of its model, time by how long the
model takes on this machine. Estimates: fragmentation, and what libraries and agents do, come on
top."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algorithms.model.cpu_threads import computing_with
from agentrl.algorithms.model.lm_head import MAX_LOGITS
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.config import RunConfig
from agentrl.config.policies import trained_policies, view
from agentrl.processes import PHASE
from agentrl.simulation import Simulation, Workload

log = logging.getLogger("agentrl.algorithm")

GIB = 2**30
USABLE = 0.9  # of the memory
READ = 128  # tokens of the forward pass that is measured
HANDLED = 0.006  # seconds of a call in its client, the gateway and the store, measured on two cores
CURE = (
    "set what is smaller of learner.token_budget, engine.max_batch and engine.max_context, or "
    "learner.gradient_checkpointing=true, policy.dtype=bfloat16 or policy.lora.rank=16"
)


def announce(config: RunConfig, models: list[LoadedModel]) -> None:
    """Log the estimates of a run that is about to train; a warning where memory will not do."""
    learning = trained_policies(config) if config.steps and config.learner.kind == "torch" else []
    for model in (each for each in models if set(each.policies).intersection(learning)):
        own = view(config, next(name for name in model.policies if name in learning))
        fits, sentence = memory(own, model.model)
        log.log(PHASE if fits else logging.WARNING, f"memory: about {sentence}")
        for line in duration(own, model.model):
            log.log(PHASE, line)


def shape_of(source: str, *, local: bool = False) -> Any:
    """The model of a directory or hub name without its weights. local: asks nobody for it."""
    with torch.device("meta"):
        shape = AutoConfig.from_pretrained(source, local_files_only=local)
        return AutoModelForCausalLM.from_config(shape)


def describe(config: RunConfig, source: str) -> Iterator[str]:
    """Both estimates of a model that is not loaded. Its place is filled with zeros for a moment."""
    network = shape_of(source, local=True)
    fits, sentence = memory(config, network)
    yield f"memory: about {sentence}"
    if fits:
        where = config.policy.device
        device = ("cuda" if torch.cuda.is_available() else "cpu") if where == "auto" else where
        network = network.to(getattr(torch, config.policy.dtype)).to_empty(device=device).eval()
        for each in network.parameters():
            each.detach().zero_()
        yield from duration(config, network)


def memory(config: RunConfig, network: Any) -> tuple[bool, str]:
    """Whether it suffices, and a sentence with the parts, that ends in a cure."""
    usable, parts = USABLE * available(config), bytes_needed(config, network)
    shown = ", ".join(f"{name} {size / GIB:.2g}" for name, size in parts.items())
    sentence = f"{sum(parts.values()) / GIB:.2g} of {usable / GIB:.2g} GiB: {shown}"
    fits = sum(parts.values()) <= usable
    return fits, sentence if fits else f"{sentence}; {CURE}"


def bytes_needed(config: RunConfig, network: Any) -> dict[str, float]:
    """By purpose, of a policy that learns and is served in one process."""
    shape, learner, engine = network.config.get_text_config(), config.learner, config.engine
    width = 4 if config.policy.dtype == "float32" else 2
    weights, layers, hidden = network.num_parameters(), shape.num_hidden_layers, shape.hidden_size
    linear = [m for m in network.modules() if isinstance(m, torch.nn.Linear)]
    adapter = config.policy.lora.rank * sum(m.in_features + m.out_features for m in linear)
    beside = sum(bool(own.model) for own in (config.reference, config.teacher, config.critic))
    # Kept of each token and layer: about 14 vectors of the hidden size and 3 of the MLP's.
    kept = 14 * hidden + 3 * getattr(shape, "intermediate_size", 4 * hidden)
    of_layers = layers * hidden + kept if learner.gradient_checkpointing else layers * kept
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads
    cached = engine.max_batch * engine.max_context if engine.kind == "embedded" else 0
    return {
        "weights": weights * width * (1 + beside),
        # Gradient, two moments and, of bfloat16, a master weight, all of them float32.
        "optimizer": (adapter or weights) * (12 if width == 4 else 16),
        "KV cache": cached * layers * 2 * heads * size * width,
        # A chunk of logits, its softmax and gradient; the sampler's rows.
        "logits": 4 * (3 * MAX_LOGITS + 2 * engine.max_batch * shape.vocab_size),
        "activations": learner.token_budget * of_layers * width,
    }


def available(config: RunConfig) -> int:
    """Bytes of the GPU or of this machine."""
    if config.policy.device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def duration(config: RunConfig, network: Any) -> Iterator[str]:
    """A sentence on the time of a run whose rollouts are one call each."""
    algorithm, runner = config.algorithm, config.runner
    if config.data.name or config.engine.kind != "embedded":
        what = "a run on [data]" if config.data.name else f"engine.kind = {config.engine.kind!r}"
        yield f"time: not estimated for {what}; the first steps will tell"
        return
    rollouts = algorithm.groups * algorithm.group_size
    slots = min(runner.processes * runner.concurrency or rollouts, rollouts)
    rows = max(2, min(config.engine.max_batch, slots))
    tokens = config.sampling.max_tokens or config.engine.max_context
    one, many = seconds_of(network, 1, 1), seconds_of(network, rows, 1)
    per_call = max(0.0, many - one) / (rows - 1)
    passes = algorithm.epochs * (4 if config.learner.gradient_checkpointing else 3)  # with backward
    work = Workload(
        groups=algorithm.groups,
        group_size=algorithm.group_size,
        slots=slots,
        calls=1,
        tokens=tokens,
        decode=one,
        per_call=per_call,
        prompt=HANDLED,
        update=seconds_of(network, 1, READ) / READ * passes * rollouts * tokens,
    )
    in_flight = algorithm.overlap == "in_flight"
    step = Simulation(work, algorithm.max_staleness, in_flight=in_flight).run(steps=5).seconds
    whole = step * config.steps
    yield (
        f"time: about {step:.2g} s a step, {whole / 60:.2g} minutes in all, if a rollout is a call "
        f"of {tokens} tokens; shorter answers take less, prompts, tools and more calls take more"
    )


@torch.no_grad()
def seconds_of(network: Any, rows: int, tokens: int) -> float:
    """The fastest of four forward passes, two with one thread, which suits small models; or the
    only one where that takes more than a second."""
    ids, times = torch.zeros((rows, tokens), dtype=torch.long, device=network.device), []
    for threads in (*(torch.get_num_threads(),) * 2, 1, 1):
        with computing_with(threads):
            started = time.perf_counter()
            network(input_ids=ids, use_cache=False).logits[0, 0, 0].item()  # waits for a GPU
            times.append(time.perf_counter() - started)
        if times[0] > 1:
            break
    return min(times)
