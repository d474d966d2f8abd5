"""Settings to train a pretrained model on this machine, measured on it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from agentrl.algorithms import estimate
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.lm_head import computing_with, sampling_threads
from agentrl.algorithms.model.load import DTYPES, check_directory, load_model, no_progress_bars
from agentrl.core.config import LoraConfig, RunConfig
from agentrl.core.errors import PolicyError
from agentrl.measured import timeout

RANK = 16  # of an adapter
LEARNING_RATE, WIDTH, WIDTH_EXPONENT = 5e-4, 576, -0.78  # of an adapter on a model of this width
MAX_TOKENS = 128  # tokens of one completion
MAX_CONTEXT, MIN_CONTEXT = 4096, 512  # tokens: bounds of the search for a context that fits
CONCURRENCY = 32  # rollouts with concurrently decoded calls
MEASUREMENTS = 3


def settings(model: str) -> dict[str, Any]:
    """Measured settings for a model: dtype, threads, context, time-out and dependent settings.

    Raises PolicyError for a model that cannot be loaded or does not fit into memory."""
    folder = Path(model).expanduser()
    source = str(folder.resolve()) if folder.is_dir() else model
    check_directory(source)
    try:
        shape = estimate.shape_of(source)
    except (OSError, ValueError) as error:
        raise PolicyError(f"model {model!r}: {str(error).splitlines()[0]}") from None
    hidden = shape.config.get_text_config().hidden_size
    dtype = fastest_dtype(hidden)
    chosen = RunConfig()
    policy = replace(chosen.policy, dtype=dtype, lora=LoraConfig(rank=RANK))
    context = min(MAX_CONTEXT, context_length(shape) or MAX_CONTEXT)
    while True:
        engine = replace(chosen.engine, max_batch=CONCURRENCY, max_context=context)
        fits, sentence = estimate.memory(replace(chosen, policy=policy, engine=engine), shape)
        if fits:
            break
        if context <= MIN_CONTEXT:
            raise PolicyError(f"model {model!r} needs more memory than available: {sentence}")
        context = max(MIN_CONTEXT, context // 2)
    per_token = seconds_per_token(source, dtype)
    return {
        "model": source,
        "threads": sampling_threads(sum(parameter.numel() for parameter in shape.parameters())),
        "dtype": dtype, "rank": RANK, "lr": learning_rate(hidden), "context": context,
        "max_tokens": MAX_TOKENS, "concurrency": CONCURRENCY,
        "per_token": per_token, "timeout": timeout(per_token, MAX_TOKENS),
        "rate": round(CONCURRENCY / per_token),
    }  # fmt: skip


def learning_rate(hidden: int) -> float:
    """Of an adapter, for reinforcement learning: measured with SmolLM2-135M, whose hidden states
    are 576 wide, and lower for wider models by the exponent that tinker-cookbook fitted to Llamas.
    An update that goes too far is undone and repeated at a lower rate (algorithm.max_kl)."""
    return float(f"{LEARNING_RATE * (hidden / WIDTH) ** WIDTH_EXPONENT:.1e}")


def fastest_dtype(hidden: int) -> str:
    """The dtype in which this machine multiplies matrices of a model fastest; on a GPU bfloat16."""
    if torch.cuda.is_available():
        return "bfloat16"
    seconds = {}
    for name, dtype in DTYPES.items():
        tokens = torch.ones((CONCURRENCY, hidden), dtype=dtype)
        weight = torch.ones((hidden, 4 * hidden), dtype=dtype)
        seconds[name] = _fastest(partial(torch.matmul, tokens, weight))
    return min(seconds, key=lambda name: seconds[name])


def seconds_per_token(source: str, dtype: str) -> float:
    """Seconds to decode one token of each of CONCURRENCY calls."""
    with no_progress_bars():
        model, _ = load_model(source, dtype)
    tokens = torch.ones((CONCURRENCY, 1), dtype=torch.long, device=str(model.device))
    with torch.inference_mode():
        return _fastest(lambda: model(input_ids=tokens).logits.cpu())


def _fastest(work: Callable[[], object]) -> float:
    """The minimum of MEASUREMENTS times in seconds, after a warm-up: on CPUs the CPU time of one
    core, which other programs on the machine hardly change."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    seconds = []
    with computing_with(1):
        for _ in range(1 + MEASUREMENTS):
            started = clock()
            work()
            seconds.append(clock() - started)
    return min(seconds[1:])


if __name__ == "__main__":  # run as a separate process by `Trainer`, which never loads torch
    try:
        print(json.dumps(settings(sys.argv[1])))
    except PolicyError as error:
        sys.exit(str(error))
