"""Weights read back from a checkpoint, which are found to fit before anything changes.

The policy's are a Hugging Face directory. Those of models that are part of a run's state without
being its policy (a critic, a reference that follows the policy, a reward model in training) are one
safetensors file each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

from agentrl.algorithms.model.load import load_model, no_progress_bars
from agentrl.errors import DamagedError, PolicyError


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
        raise DamagedError(
            f"checkpoint {file.parent}: {file.name} is missing or incomplete ({error}); "
            "resume from another checkpoint"
        ) from None
    if found := shape_mismatch(saved, dict(module.named_parameters())):
        name, there, here = found
        raise PolicyError(
            f"checkpoint {file.parent}: {file.name} is of another model ({name} is "
            f"{there} there, {here} here); resume with the model it was made with"
        )
    return saved


def read_policy(policy: Module, directory: Path) -> dict[str, Tensor]:
    """Weights and buffers of a checkpoint of this policy, by name. Raises PolicyError for one of
    another model or a half-written one."""
    with no_progress_bars():
        model, _ = load_model(directory, device="cpu")
    saved: dict[str, Tensor] = model.state_dict()
    if found := shape_mismatch(saved, policy.state_dict()):
        name, there, here = found
        raise PolicyError(
            f"checkpoint {directory}: it is of another model ({name} is {there} there, "
            f"{here} in the policy); resume with the model it was made from"
        )
    return saved


def shape_mismatch(
    saved: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> tuple[str, str, str] | None:
    """The first name whose tensors differ in shape, and their shapes; "none" where it is not."""
    for name in sorted(saved.keys() | own.keys()):
        there, here = (str(list(of[name].shape)) if name in of else "none" for of in (saved, own))
        if there != here:
            return name, there, here
    return None


def copy_weights(module: Module, saved: Mapping[str, Tensor]) -> None:
    """Make these the weights of a module, by name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(saved[name])
