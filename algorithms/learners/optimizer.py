"""AdamW on named parameters, with float32 master weights for bfloat16 and float16 parameters.

Owns master weights and moments, and the gradients during a step. Invariant: updates are computed
in float32 or wider, gradients of narrow weights are summed over micro-batches in float32, and a
model weight is its master weight rounded once.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grad_norm_

from agentrl.algorithms.learners.memory import is_out_of_memory
from agentrl.algorithms.model.load import copy_weights, read_weights, save_weights
from agentrl.core.errors import DamagedError, PolicyError, TrainingError, install_command

FILE = "optimizer.safetensors"  # tensors "<parameter>/<moment>", and "<parameter>/master"
MASTER = "master"
UNUSED = "without_moments"  # metadata of FILE: a JSON list of the parameters without moments
OptimizerKind = Literal["adamw", "adamw8bit", "paged_adamw8bit"]
BETAS = (0.9, 0.95)
NARROW = (torch.bfloat16, torch.float16)
# Moments with one element per weight.
SHAPED = ("exp_avg", "exp_avg_sq", "state1", "state2", MASTER)
_EIGHT_BIT = {"adamw8bit": "AdamW8bit", "paged_adamw8bit": "PagedAdamW8bit"}


class Optimizer:
    """The optimizer of named parameters. Raises PolicyError for a kind that cannot run here."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        *,
        kind: OptimizerKind = "adamw",
        weight_decay: float = 0.0,
    ) -> None:
        self.kind = kind
        self.parameters = dict(parameters)
        self.masters = {
            name: Parameter(p.detach().float()) if p.dtype in NARROW else p
            for name, p in parameters.items()
        }
        for name, parameter in self._narrow():
            hook = partial(_move_gradient, self.masters[name])
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.inner = _make(kind, list(self.masters.values()), weight_decay)

    def clip(self, limit: float) -> float:
        """Clip the gradients to this norm; returns the norm before clipping."""
        return float(clip_grad_norm_(self.masters.values(), limit))

    def step(self, lr: float) -> None:
        """Update weights and moments from the gradients. Raises TrainingError, with the weights
        unchanged, if there is no memory for the moments, which the first step allocates."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        try:
            self.inner.step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"there is no memory for the optimizer ({str(error).splitlines()[0]}); set "
                "learner.optimizer = 'paged_adamw8bit', or train a smaller model"
            ) from None
        self._round()

    def shrunk(self, share: float) -> None:
        """Called after the master weights were set back to this share of the last update: shrinks
        the momentum to match. See `Learner`."""
        shrink_momentum(self.inner, share)
        self._round()

    def move(self, device: torch.device | None) -> None:
        """Move moments and masters; None: to the weights' device, as a backward pass needs."""
        for name, parameter in self.parameters.items():
            master, target = self.masters[name], device or parameter.device
            if master is not parameter:
                moved = Parameter(master.detach().to(target))
                torch.utils.swap_tensors(master, moved)  # type: ignore[no-untyped-call]
            state = self.inner.state.get(master, {})
            # Step counts stay: bitsandbytes has ints, and fused AdamW needs its tensor on the GPU.
            large = {key: x for key, x in state.items() if isinstance(x, Tensor) and x.ndim}
            state |= {key: value.to(target) for key, value in large.items()}

    def zero_grad(self) -> None:
        """Free all gradients, also those of an interrupted backward pass."""
        self.inner.zero_grad(set_to_none=True)
        for _, parameter in self._narrow():
            parameter.grad = None

    def save(self, directory: Path) -> None:
        """Write master weights and moments into FILE. A parameter that has never had a gradient,
        such as one of a vision tower in training on text, has no moments."""
        tensors = {f"{n}/{MASTER}": self.masters[n].detach() for n, _ in self._narrow()}
        state = self.inner.state_dict()["state"]
        for index, name in enumerate(self.parameters):
            for moment, value in state.get(index, {}).items():
                # bitsandbytes counts its steps in a Python int.
                tensors[f"{name}/{moment}"] = torch.as_tensor(value).contiguous()
        save_state(tensors, self.parameters, self.kind, directory)

    def read(self, directory: Path) -> Callable[[], None]:
        """Read FILE; returns a function that restores it. Raises PolicyError if it does not fit."""
        return partial(self._restore, read_state(directory, self.parameters, self.kind))

    def _restore(self, saved: Mapping[str, Tensor]) -> None:
        """Set master weights, model weights and moments."""
        with torch.no_grad():
            for name, _ in self._narrow():
                self.masters[name].copy_(saved[f"{name}/{MASTER}"])
        self._round()
        state: dict[int, dict[str, Any]] = {}
        numbers = {name: index for index, name in enumerate(self.parameters)}
        for key, tensor in saved.items():
            name, _, moment = key.rpartition("/")
            if moment != MASTER:
                counts = not tensor.is_floating_point() and not tensor.ndim
                value = int(tensor) if counts else tensor
                state.setdefault(numbers[name], {})[moment] = value
        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": state, "param_groups": groups})

    def _narrow(self) -> list[tuple[str, Parameter]]:
        """Parameters that have a master weight."""
        return [(n, p) for n, p in self.parameters.items() if self.masters[n] is not p]

    def _round(self) -> None:
        with torch.no_grad():
            for name, parameter in self._narrow():
                parameter.copy_(self.masters[name])


def shrink_momentum(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Scale the first moments by share^2: they would continue to push where a step was undone."""
    for state in optimizer.state.values():
        # bitsandbytes' 8-bit moments of large weights have a scale per block.
        first = next(key for key in ("exp_avg", "absmax1", "state1") if key in state)
        state[first].mul_(share**2)


def save_trained(module: Module, optimizer: Optimizer, file: Path) -> None:
    """Write a module's weights to `file`, and its optimizer next to it."""
    save_weights(module, file)
    optimizer.save(file.parent)


def read_trained(module: Module, optimizer: Optimizer, file: Path) -> Callable[[], None]:
    """Read what `save_trained` wrote; returns a function that restores it. Raises PolicyError."""
    weights, restore_optimizer = read_weights(module, file), optimizer.read(file.parent)

    def restore() -> None:
        copy_weights(module, weights)
        restore_optimizer()

    return restore


def save_state(
    tensors: dict[str, Tensor], parameters: Iterable[str], kind: OptimizerKind, directory: Path
) -> None:
    """Write FILE for an optimizer of these parameters, for `read_state`."""
    with_moments = {key.rpartition("/")[0] for key in tensors if not key.endswith(f"/{MASTER}")}
    unused = [name for name in parameters if name not in with_moments]
    metadata = {"optimizer": kind, UNUSED: json.dumps(unused)}
    save_file(tensors, directory / FILE, metadata=metadata)


def read_state(
    directory: Path, parameters: Mapping[str, Tensor], kind: OptimizerKind
) -> dict[str, Tensor]:
    """Read FILE for an optimizer of these parameters. Raises PolicyError if it does not fit."""
    try:
        with safe_open(directory / FILE, framework="pt") as file:
            metadata = file.metadata() or {}
            saved_kind, unused = metadata.get("optimizer"), json.loads(metadata.get(UNUSED, "[]"))
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DamagedError(
            f"checkpoint {directory}: {FILE} is missing or incomplete ({error}); "
            "resume from another checkpoint"
        ) from None
    if saved_kind != kind:
        raise PolicyError(
            f"checkpoint {directory}: its optimizer is {saved_kind!r}, not {kind!r}; set "
            f"learner.optimizer = {saved_kind!r}, or start a new run from these weights"
        )
    _check(directory, saved, parameters, unused)
    return saved


def _check(
    directory: Path,
    saved: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    unused: Sequence[str],
) -> None:
    """Raise PolicyError unless all parameters except the file's `unused` ones have moments (before
    the first step none has), all 16-bit parameters have master weights, and the shapes fit."""
    moments = {key.rpartition("/")[0] for key in saved if not key.endswith(f"/{MASTER}")}
    masters = {key.rpartition("/")[0] for key in saved if key.endswith(f"/{MASTER}")}
    expected = [(moments | set(unused), set(parameters) if moments or unused else set())]
    expected.append((masters, {name for name, p in parameters.items() if p.dtype in NARROW}))
    for in_file, wanted in expected:
        for name in sorted(in_file ^ wanted):
            where = "in the file, not in the policy" if name in in_file else "only in the policy"
            raise PolicyError(
                f"checkpoint {directory}: {FILE} is of another model ({name} is {where}); "
                "resume with the model and policy.dtype it was made with"
            )
    for key, tensor in saved.items():
        name, _, moment = key.rpartition("/")
        shapes = list(tensor.shape), list(parameters[name].shape)
        if moment in SHAPED and shapes[0] != shapes[1]:
            raise PolicyError(
                f"checkpoint {directory}: {FILE} is of another model ({key} is {shapes[0]}, "
                f"{shapes[1]} in the policy); resume with the model it was made from"
            )


def _move_gradient(master: Parameter, parameter: Tensor) -> None:
    """Add a narrow parameter's gradient to that of its master weight, and free it."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


def _make(
    kind: OptimizerKind, weights: list[Parameter], weight_decay: float
) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(weights, betas=BETAS, weight_decay=weight_decay, fused=True)
    if any(weight.device.type != "cuda" for weight in weights):
        raise PolicyError(
            f"learner.optimizer = {kind!r}: it needs a CUDA device, and the policy is on "
            f"{weights[0].device.type}; use 'adamw'"
        )
    try:
        library = importlib.import_module("bitsandbytes.optim")
    except ImportError as error:
        raise PolicyError(
            f"learner.optimizer = {kind!r}: bitsandbytes cannot be imported ({error}); "
            f"{install_command('eight-bit')}, or use 'adamw'"
        ) from None
    optimizer: torch.optim.Optimizer = getattr(library, _EIGHT_BIT[kind])(
        weights, betas=BETAS, weight_decay=weight_decay
    )
    return optimizer
