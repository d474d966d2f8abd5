"""Weights of a module in one safetensors file, for models that are part of a run's state without
being its policy: a critic, a reference that follows the policy, a reward model in training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

from agentrl.errors import PolicyError


def save_weights(module: Module, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Parameters alone, each once: buffers are computed from the configuration, and tied weights
    # are one parameter under two names.
    save_file({name: p.detach().contiguous() for name, p in module.named_parameters()}, file)


def read_weights(module: Module, file: Path) -> dict[str, Tensor]:
    """What `save_weights` wrote, for `copy_weights`. Raises PolicyError if it is missing, half
    written or of another model."""
    try:
        saved: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise PolicyError(
            f"checkpoint {file.parent}: {file.name} is missing or incomplete ({error}); "
            "resume from another checkpoint"
        ) from None
    own = dict(module.named_parameters())
    for name in sorted(saved.keys() | own.keys()):
        shapes = [str(list(of[name].shape)) if name in of else "none" for of in (saved, own)]
        if shapes[0] != shapes[1]:
            raise PolicyError(
                f"checkpoint {file.parent}: {file.name} is of another model ({name} is "
                f"{shapes[0]} there, {shapes[1]} here); resume with the model it was made with"
            )
    return saved


def copy_weights(module: Module, saved: Mapping[str, Tensor]) -> None:
    """Make these the weights of a module, by name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(saved[name])
