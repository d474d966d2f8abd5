"""The time of a run before it starts, measured with its model on this machine: of the policy
server's decoding with all calls and with one, and of a forward pass. Agents are not included."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from agentrl.algorithms.engines.embedded.engine import Engine, TokenUpdates
from agentrl.algorithms.engines.embedded.kv_cache import GenerationRequest
from agentrl.algorithms.model.cpu_threads import computing_with
from agentrl.algorithms.preflight.simulation import Simulation, Workload
from agentrl.base.progress import lasting
from agentrl.config import RunConfig
from agentrl.config.run_file import tasks_of
from agentrl.errors import PolicyError
from agentrl.types import Sampling

DECODED = 4  # measured decoding steps
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
    # A prompt is computed once for the rollouts of its group, where they are packed as a trie.
    prompts = algorithm.groups if config.learner.packed == "trie" else rollouts
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
        * (rollouts * tokens + prompts * prompt_tokens(config, network)),
    )
    in_flight = algorithm.samples_during_update
    step = Simulation(work, algorithm.max_staleness, in_flight=in_flight).run(steps=5).seconds
    yield (
        f"time: about {_roughly(step)} a step, {_roughly(step * config.steps)} for {config.steps} "
        f"steps, if a rollout is one call of {tokens} tokens; more calls, long prompts and tools "
        "add to it"
    )


def _roughly(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 99.5 else lasting(seconds)


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
    models; of a single one if it takes more than a second. Of one token: of as many decoding steps
    of the policy server, with sampling."""
    if tokens == 1:
        return decoding(network, rows)
    ids, times = torch.zeros((rows, tokens), dtype=torch.long, device=network.device), []
    for threads in (*(torch.get_num_threads(),) * 2, 1, 1):
        with computing_with(threads):
            started = time.perf_counter()
            network(input_ids=ids, use_cache=False).logits[0, 0, 0].item()  # waits for a GPU
            times.append(time.perf_counter() - started)
        if times[0] > 1:
            break
    return min(times)


def decoding(network: Any, rows: int) -> float:
    """Seconds of the fastest decoding step of `rows` calls, with one thread. Raises PolicyError for
    a model that the policy server cannot run."""
    steps: SimpleQueue[tuple[float, str]] = SimpleQueue()

    def deliver(updates: TokenUpdates) -> None:
        steps.put((time.perf_counter(), updates[0][1].error))

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
