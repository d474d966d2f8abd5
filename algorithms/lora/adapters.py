"""Named LoRA adapters on one frozen base model, trained and served by one process.

peft creates, initialises and describes the layers. They are applied here, because one packed
sequence of the policy server has tokens of several adapters, and because peft's own switch walks
every layer and turns gradients off. LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear
from transformers import PreTrainedModel

from agentrl.algorithms.lora.linear import add_adapter
from agentrl.algorithms.lora.quantize import dense_state, is_quantized, save_dense
from agentrl.algorithms.model import digests
from agentrl.algorithms.model.adapters import CONFIG, Adapters, Selection
from agentrl.algorithms.model.load import checkpoint_weights, shape_mismatch
from agentrl.errors import DamagedError, PolicyError, nearest

WEIGHTS = "adapter_model.safetensors"  # beside `CONFIG`
ALL = "all-linear"  # peft's name for all linear layers but the head
PREFIX = "base_model.model."  # of every name in WEIGHTS
FINGERPRINT_SAMPLES = 64  # elements of each weight in the fingerprint of a base


class LoraAdapters(Adapters):
    """The adapters of one model. Adding the first freezes the model's own weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.base = str(model.name_or_path)
        # A quantised base has other weights than the same base without quantisation.
        self.fingerprint = "" if is_quantized(model) else fingerprint(model)
        self._peft: Any = None  # peft's wrapper of `model`, set by the first adapter
        self._references: dict[str, str] = {}  # adapter -> a frozen one
        self._selection: Selection = ()
        self._wide = True
        self._lock = threading.RLock()

    @property
    def names(self) -> list[str]:
        every = self._peft.peft_config if self._peft is not None else ()
        return [name for name in every if name not in self._references.values()]

    def add(
        self, name: str, *, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0
    ) -> None:
        if name in self.names or "." in name:
            raise PolicyError(f"adapter {name!r}: the name is taken, or has a dot in it")
        self._check_targets(targets)
        peft, beside = _peft(), _beside_decoder(self.model)
        # peft's own list of all layers would name those beside the decoder too.
        every = sorted({path.rpartition(".")[2] for path in self._text_layers()}) if beside else ALL
        settings = peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=list(targets) or every,
            exclude_modules=beside or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base or None,
        )
        with torch.random.fork_rng(devices=[]):
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            if self._peft is None:
                self._peft = peft.get_peft_model(self.model, settings, adapter_name=name)
            else:
                self._peft.add_adapter(name, settings)
        for layer in self._layers().values():
            layer.enable_adapters(False)  # peft's forward is the base layer's; `_apply` adds delta
            if not layer._forward_hooks:
                layer.register_forward_hook(self._apply)
        self._unfreeze()
        self.model.eval()

    def open(self, name: str, directory: Path) -> None:
        digests.check(directory)
        self._add_like(name, _settings(directory))
        self.restore(name, self.read(name, directory))

    def fits(self, directory: Path) -> bool:
        return base_of(directory) == self.base

    def copy(self) -> LoraAdapters:
        own = {id(p) for name in self.names for p in self.parameters(name).values()}
        shared: dict[int, object] = {id(p): p for p in self.model.parameters() if id(p) not in own}
        return copy.deepcopy(self, shared | {id(self._lock): threading.RLock()})

    def duplicate(self, name: str, source: Adapters, original: str) -> None:
        assert isinstance(source, LoraAdapters)
        self._add_like(name, source._peft.peft_config[original])
        self.restore(name, source.parameters(original))

    def keep_reference(self, name: str) -> None:
        self._references[name] = kept = f"{name}@reference"
        self.duplicate(kept, self, name)

    def reference(self, name: str) -> str | None:
        return self._references.get(name)

    def close(self, name: str) -> None:
        self._check_name(name)
        if name == self.names[0]:
            raise PolicyError(f"adapter {name!r}: it is the first one, which cannot be removed")
        self._peft.delete_adapter(name)
        self._unfreeze()

    def parameters(self, name: str) -> dict[str, Parameter]:
        self._check_name(name)
        return {
            f"{path}.{side}": getattr(layer, side)[name].weight
            for path, layer in self._layers().items()
            if name in layer.lora_A
            for side in ("lora_A", "lora_B")
        }

    @contextmanager
    def using(self, name: str | None, *, wide: bool = False) -> Iterator[None]:
        if name is not None:
            self._check_name(name)
        with self.routed(() if name is None else ((name, None),), wide=wide):
            yield

    @contextmanager
    def routed(self, selection: Selection, *, wide: bool = True) -> Iterator[None]:
        with self._lock:
            before, self._selection, self._wide = ((self._selection, self._wide), selection, wide)
            try:
                yield
            finally:
                self._selection, self._wide = before

    def save(self, name: str, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{PREFIX}{key}.weight": parameter.detach().cpu().contiguous()
            for key, parameter in self.parameters(name).items()
        }
        self._peft.peft_config[name].save_pretrained(directory)
        metadata = {"format": "pt"} | ({"base": self.fingerprint} if self.fingerprint else {})
        save_file(tensors, directory / WEIGHTS, metadata=metadata)

    def read(self, name: str, directory: Path) -> dict[str, Tensor]:
        parameters, own = self.parameters(name), self._peft.peft_config[name]
        settings = _settings(directory)
        try:
            with safe_open(directory / WEIGHTS, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise DamagedError(
                f"adapter {directory}: {WEIGHTS} is missing or incomplete ({error}); "
                "resume from another checkpoint"
            ) from None
        # Adapters of other tools and of quantised bases have no fingerprint, only a base name.
        known = bool(self.fingerprint) and "base" in metadata
        theirs = metadata["base"] if known else settings.base_model_name_or_path
        if theirs != (self.fingerprint if known else self.base):
            raise PolicyError(
                f"adapter {directory}: it was trained on another base "
                f"({settings.base_model_name_or_path!r}), not on {self.base!r}; set policy.model to"
                f" that base, or if it is the same model, name this one in {CONFIG}"
            )
        pairs = [("rank", settings.r, own.r), ("alpha", settings.lora_alpha, own.lora_alpha)]
        for key, there, here in pairs:
            if there != here:
                raise PolicyError(
                    f"adapter {directory}: its {key} is {there:g}, the policy's {here:g}; "
                    f"set policy.lora.{key} = {there:g}"
                )
        found = {key.removeprefix(PREFIX).removesuffix(".weight"): t for key, t in tensors.items()}
        if mismatch := shape_mismatch(found, parameters):
            raise PolicyError(
                f"adapter {directory}: {mismatch} in the policy; "
                "set policy.lora.targets and policy.model to those of the adapter"
            )
        return found

    def restore(self, name: str, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for key, parameter in self.parameters(name).items():
                parameter.copy_(weights[key])

    def merge(self, name: str, directory: Path) -> None:
        self._write(self.merged(name), directory)

    def merged(self, name: str) -> dict[str, Tensor]:
        self._check_name(name)
        weights = self._base()
        for path, layer in self._layers().items():
            if name in layer.lora_A:
                weight = weights[f"{path}.weight"].detach()
                delta = layer.get_delta_weight(name).detach()
                weights[f"{path}.weight"] = (weight.to(delta.dtype) + delta).to(weight.dtype)
        return weights

    def save_base(self, directory: Path) -> None:
        self._write(self._base(), directory)

    def rank(self, name: str) -> int:
        self._check_name(name)
        return int(self._peft.peft_config[name].r)

    def _add_like(self, name: str, settings: Any) -> None:
        targets = settings.target_modules
        targets = () if isinstance(targets, str) else sorted(targets)
        self.add(name, rank=settings.r, alpha=settings.lora_alpha, targets=targets)

    def _base(self) -> dict[str, Tensor]:
        return {
            key.replace(".base_layer.", "."): tensor
            for key, tensor in dense_state(self.model).items()
            if ".lora_" not in key
        }

    def _write(self, weights: dict[str, Tensor], directory: Path) -> None:
        if is_quantized(self.model):
            save_dense(self.model, directory, checkpoint_weights(self.model, weights))
        else:
            self.model.save_pretrained(directory, state_dict=weights)

    def _apply(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Forward hook of every adapted layer: [..., N, in] -> [..., N, out]."""
        for name, tokens in self._selection:
            if name not in layer.lora_A:  # adapters may have different targets
                continue
            down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
            dtype = down.dtype if self._wide and not output.is_cuda else output.dtype
            down, up = down.to(dtype), up.to(dtype)
            base, scale = layer.base_layer, layer.scaling[name]
            alone = tokens is None and len(self._selection) == 1
            if alone and dtype == output.dtype and type(base) is Linear:
                output = add_adapter(inputs[0], output, base.weight, down, up, scale)
                continue
            x = inputs[0] if tokens is None else inputs[0].index_select(-2, tokens)
            narrow = linear(x.to(dtype), down)
            delta = linear(narrow, up).to(output.dtype)
            if tokens is None:
                output = output.add(delta, alpha=scale)
            else:
                output = output.index_add(-2, tokens, delta, alpha=scale)
        return output

    def _layers(self) -> dict[str, Any]:
        """The layers that have adapters, by their name in the base."""
        if self._peft is None:
            return {}
        named = self.model.named_modules()
        return {path: module for path, module in named if hasattr(module, "lora_A")}

    def _unfreeze(self) -> None:
        """Make all adapters trainable; peft freezes all but the active one."""
        for name in self.names:
            for parameter in self.parameters(name).values():
                parameter.requires_grad_(True)

    def _check_name(self, name: str) -> None:
        if name not in (*self.names, *self._references.values()):
            raise PolicyError(f"no adapter {name!r}; {nearest(name, self.names)}")

    def _text_layers(self) -> set[str]:
        """The paths of all linear layers but the head and those beside the text decoder."""
        head, beside = self.model.get_output_embeddings(), set(_beside_decoder(self.model))
        return {
            path.removesuffix(".base_layer")
            for path, module in self.model.named_modules()
            if isinstance(module, Linear) and module is not head and ".lora_" not in path
            if path not in beside
        }

    def _check_targets(self, targets: Sequence[str]) -> None:
        paths = self._text_layers()
        for target in targets:
            if not any(f".{path}".endswith(f".{target}") for path in paths):
                names = {path.rpartition(".")[2] for path in paths}
                raise PolicyError(
                    f"policy.lora.targets: {self.base!r} has no linear layers {target!r} beside "
                    f"its head; {nearest(target, names)}"
                )


def fingerprint(model: Module) -> str:
    """A digest of the shapes and a sample of each weight, equal in float32 and bfloat16."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // FINGERPRINT_SAMPLES)].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(parameter.shape)}".encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _beside_decoder(model: PreTrainedModel) -> list[str]:
    """The linear layers outside of the text decoder, such as those of a vision tower: adapters are
    for text."""
    head, own = model.get_output_embeddings(), set(map(id, model.get_decoder().modules()))
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, Linear) and module is not head and id(module) not in own
    ]


def base_of(directory: Path) -> str:
    """The base model, a directory or hub name, in an adapter's configuration."""
    return str(_settings(directory).base_model_name_or_path)


def _settings(directory: Path) -> Any:
    try:
        if not (directory / CONFIG).is_file():  # peft would look for the name on the hub
            raise FileNotFoundError(f"no such file in {directory}")
        settings = _peft().PeftConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PolicyError(
            f"adapter {directory}: {CONFIG} is missing or unreadable ({error}); "
            "give a directory that peft wrote"
        ) from None
    plain = str(settings.peft_type).endswith("LORA") and settings.bias == "none"
    if not plain or settings.use_dora or settings.use_rslora or settings.modules_to_save:
        raise PolicyError(
            f"adapter {directory}: only plain LoRA is supported (no DoRA, rank-stabilised scale, "
            "bias or modules_to_save)"
        )
    return settings


def _peft() -> Any:
    # peft 0.21 reads a property that transformers 5.23 deprecates, for every adapter.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    try:
        import peft
    except ImportError as error:
        raise PolicyError(
            f"policy.lora: peft cannot be imported ({error}); pip install 'agentrl[lora]'"
        ) from None
    return peft
