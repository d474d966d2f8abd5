"""Memory of an update: gradient checkpointing, peak usage and out-of-memory errors."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.core.errors import PolicyError

MB = 10**6


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The layers that support gradient checkpointing. Raises PolicyError if there are none."""
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise PolicyError(
            f"learner.gradient_checkpointing: {type(model).__name__} has no layers that "
            "transformers can checkpoint; set it to false"
        )
    return layers


@contextmanager
def recomputing(layers: list[GradientCheckpointingLayer]) -> Iterator[None]:
    """Context in which forward passes keep only each layer's input; backward recomputes the rest.

    Transformers' own switch works only in training mode, which would turn dropout on, and it would
    disable the cache of a policy server that shares the model."""
    for layer in layers:
        # Eval mode uses no random numbers, so there is no random state to restore.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def start_measuring(device: torch.device) -> None:
    """Reset the peak memory of a CUDA device; the peak of a CPU process cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> dict[str, float]:
    """memory/peak_mb: maximum that torch allocated on the CUDA device since `start_measuring`;
    elsewhere memory/process_peak_mb: maximum resident set of this process since its start."""
    if device.type == "cuda":
        return {"memory/peak_mb": torch.cuda.max_memory_allocated(device) / MB}
    return {"memory/process_peak_mb": process_peak() / MB}


def process_peak() -> int:
    """Maximum resident set of this program in bytes. On Linux from /proc, because `getrusage`
    includes the time before `exec`, when the process was a copy of its parent."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest * (1 if sys.platform == "darwin" else 1024)
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch has an error class for GPUs, and only a message on the CPU."""
    has_type = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return has_type or "DefaultCPUAllocator" in str(error)
