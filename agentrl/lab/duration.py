"""The time of a run before it starts, from forward passes of its model on this machine. Agents are
not included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from agentrl.algorithms.model.cpu_threads import computing_with
from agentrl.config import RunConfig
from agentrl.lab.simulation import Simulation, Workload

MEASURED_TOKENS = 128  # tokens of the measured forward pass
# Seconds that client, gateway and store take for a call, measured on two cores.
HANDLING_SECONDS = 0.006


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
        prompt=HANDLING_SECONDS,
        update=seconds_of(network, 1, MEASURED_TOKENS)
        / MEASURED_TOKENS
        * passes
        * rollouts
        * tokens,
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
