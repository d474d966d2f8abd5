"""Estimates of a run before it starts: memory from the shape of its model, time from forward passes
on this machine. Fragmentation, libraries and agents are not included."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algorithms.model.cpu_threads import computing_with
from agentrl.algorithms.model.memory import GIB, USABLE, available, bytes_needed
from agentrl.algorithms.sampling.simulation import Simulation, Workload
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.base.processes import PHASE
from agentrl.config import RunConfig
from agentrl.config.policies import trained_policies, view

log = logging.getLogger("agentrl.algorithm")

READ = 128  # tokens of the measured forward pass
HANDLED = 0.006  # seconds that client, gateway and store take for a call, measured on two cores
CURE = (
    "set what is smaller of learner.token_budget, engine.max_batch and engine.max_context, or "
    "learner.gradient_checkpointing=true, policy.dtype=bfloat16 or policy.lora.rank=16"
)


def announce(config: RunConfig, models: list[LoadedModel]) -> None:
    """Log the estimates of a run that is about to train, as a warning if memory is too small."""
    learning = trained_policies(config) if config.steps and config.learner.kind == "torch" else []
    for model in (each for each in models if set(each.policies).intersection(learning)):
        own = view(config, next(name for name in model.policies if name in learning))
        fits, sentence = memory(own, model.model)
        log.log(PHASE if fits else logging.WARNING, f"memory: about {sentence}")
        for line in duration(own, model.model):
            log.log(PHASE, line)


def shape_of(source: str, *, local: bool = False) -> Any:
    """The model of a directory or hub name without its weights. local: do not ask the hub."""
    with torch.device("meta"):
        shape = AutoConfig.from_pretrained(source, local_files_only=local)
        return AutoModelForCausalLM.from_config(shape)


def describe(config: RunConfig, source: str) -> Iterator[str]:
    """Both estimates for a model that is not loaded; measures time with weights of 0."""
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
    """Whether memory suffices, and a sentence with its parts and, if not, the remedy."""
    usable, parts = USABLE * available(config), bytes_needed(config, network)
    shown = ", ".join(f"{name} {size / GIB:.2g}" for name, size in parts.items())
    sentence = f"{sum(parts.values()) / GIB:.2g} of {usable / GIB:.2g} GiB: {shown}"
    if sum(parts.values()) > usable:
        return False, f"{sentence}; {CURE}"
    total = available(config)
    if torch.cuda.is_available() and (share := config.engine.gpu_share(config, network, total)):
        sentence += f", {config.engine.kind} {share * total / GIB:.2g}"
    return True, sentence


def duration(config: RunConfig, network: Any) -> Iterator[str]:
    """A sentence with the time of the run if each rollout is one call."""
    algorithm, runner = config.algorithm, config.runner
    if not config.plays_rollouts or config.engine.kind != "embedded":
        engine = f"engine.kind = {config.engine.kind!r}"
        what = engine if config.plays_rollouts else "a run without rollouts"
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
    in_flight = algorithm.samples_during_update
    step = Simulation(work, algorithm.max_staleness, in_flight=in_flight).run(steps=5).seconds
    whole = step * config.steps
    total = f"{whole:.2g} s" if whole < 100 else f"{whole / 60:.2g} minutes"
    yield (
        f"time: about {step:.2g} s a step, {total} for {config.steps} steps, if a rollout is one "
        f"call of {tokens} tokens; more calls, long prompts and tools add to it"
    )


@torch.no_grad()
def seconds_of(network: Any, rows: int, tokens: int) -> float:
    """Seconds of the fastest of four forward passes, two of them with one thread, which suits small
    models; of a single one if it takes more than a second."""
    ids, times = torch.zeros((rows, tokens), dtype=torch.long, device=network.device), []
    for threads in (*(torch.get_num_threads(),) * 2, 1, 1):
        with computing_with(threads):
            started = time.perf_counter()
            network(input_ids=ids, use_cache=False).logits[0, 0, 0].item()  # waits for a GPU
            times.append(time.perf_counter() - started)
        if times[0] > 1:
            break
    return min(times)
