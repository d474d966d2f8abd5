"""Named LoRA adapters on one frozen base model, trained and served by one process.

peft creates, initialises and describes the layers. They are applied here, because one packed
sequence of the policy server has tokens of several adapters, and because peft's own switch walks
every layer and turns gradients off. A frozen linear layer with its adapter is one node of the
graph. The weights of experts, which are stacked in one parameter, are replaced for a call by their
sum with the adapter, as peft does. LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agentrl.algorithms.model import digests, products
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.load import (
    CONFIG,
    Adapters,
    Model,
    Selection,
    checkpoint_weights,
    load_model,
    shape_mismatch,
)
from agentrl.algorithms.model.lora_targets import (
    dense_state,
    find_targets,
    is_quantized,
    keep_gradients,
    load_quantized,
    save_dense,
)
from agentrl.core.config import RunConfig
from agentrl.core.errors import DamagedError, PolicyError, install_command, nearest
from agentrl.core.types import one_line

WEIGHTS = "adapter_model.safetensors"  # next to `CONFIG`
PREFIX = "base_model.model."  # prefix of every name in WEIGHTS
# Keys of peft's configuration that are read here, or do not change what the adapter computes.
HANDLED_KEYS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path",
    "inference_mode", "runtime_config", "r", "lora_alpha", "fan_in_fan_out",
    # Which layers have an adapter; their names are in the file of the weights.
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform",
    "layers_pattern",
    # Options of training or initialisation.
    "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "megatron_config", "megatron_core", "qalora_group_size",
}  # fmt: skip
# Initialisations that do not change the base.
PLAIN_VALUES = {
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "revision": ("main",),
}
PLAIN_FIX = (
    "merge it into its base with peft's merge_and_unload and train that, or convert it: peft's "
    "save_pretrained has path_initial_model_for_weight_conversion"
)
_WRAPPED = re.compile(r"(\.base_layer)+\.")
FINGERPRINT_SAMPLES = 64  # elements of each weight in the fingerprint of a base


class LoraAdapters(Adapters):
    """The adapters of one model. Adding the first freezes the model's own weights."""

    def __init__(self, model: PreTrainedModel, *, experts: bool = True) -> None:
        """experts: whether engine and learner can adapt those of a mixture."""
        self.model = model
        self.targets = find_targets(model, experts=experts)
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
        adapters = self._peft.peft_config if self._peft is not None else ()
        return [name for name in adapters if name not in self._references.values()]

    def add(
        self, name: str, *, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0
    ) -> None:
        if name in self.names or "." in name:
            raise PolicyError(f"adapter {name!r}: the name is taken, or has a dot in it")
        self._inject(name, rank, alpha, self.targets.chosen(targets, self.base), seed)

    def _inject(
        self, name: str, rank: int, alpha: float, paths: Sequence[str], seed: int = 0
    ) -> None:
        """Let peft create the adapter on these layers and parameters."""
        by_weight = _renamed_by_peft(self.model)
        modules = [p for p in paths if p in self.targets.layers and not by_weight(p)]
        parameters = [f"{p}.weight" for p in paths if p in self.targets.layers and by_weight(p)]
        parameters += [path for path in paths if path in self.targets.experts]
        conv = any(isinstance(self._module(path), Conv1D) for path in modules)
        settings = _peft().LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=modules,
            target_parameters=parameters or None,
            fan_in_fan_out=conv,
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base or None,
        )
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about settings that are intended
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            try:
                if self._peft is None:
                    self._peft = _peft().get_peft_model(self.model, settings, adapter_name=name)
                else:
                    self._peft.add_adapter(name, settings)
            except Exception as error:  # peft documents no exception types
                raise PolicyError(
                    f"policy.lora: peft cannot adapt {type(self.model).__name__} "
                    f"({one_line(str(error))}); choose other policy.lora.targets, or for policies "
                    "that share a base the same"
                ) from error
        self._check_made(name, paths)
        self._check_names(name)
        for path, layer in self._layers().items():
            layer.enable_adapters(False)  # peft's forward is the base layer's; `_apply` adds delta
            if not _is_experts(layer):
                if not layer._forward_hooks:
                    layer.register_forward_hook(self._apply)
            elif not path.endswith(".base_layer"):
                layer.forward = partial(self._apply_experts, layer)
        self._unfreeze()
        self.model.eval()

    def _check_made(self, name: str, paths: Sequence[str]) -> None:
        """Raise PolicyError unless peft has adapted exactly these layers and parameters."""
        adapted = self._paths(name)
        if wrong := sorted(adapted ^ set(paths)):
            raise PolicyError(
                f"policy.lora: peft {'adapts' if wrong[0] in adapted else 'does not adapt'} "
                f"{wrong[0]} of {type(self.model).__name__} ({len(wrong)} such layers); choose "
                "other policy.lora.targets, or another version of peft"
            )

    def _check_names(self, name: str) -> None:
        """Raise PolicyError if peft would read what `save` writes under other names."""
        convert = _peft_internal("convert_peft_adapter_state_dict_for_transformers")
        if convert is None:
            return
        keys = {f"{PREFIX}{key}.weight": torch.zeros(1) for key in self.parameters(name)}
        read = convert(self._peft, self._peft.peft_config[name], dict(keys), name)
        if lost := sorted(keys.keys() - {key.replace(f".{name}.", ".") for key in read}):
            paths = sorted(
                {_bare(key.removeprefix(PREFIX).rpartition(".lora_")[0]) for key in lost}
            )
            raise PolicyError(
                f"policy.lora: peft would not read an adapter on {paths[0]} again, one of "
                f"{len(paths)} such layers of {type(self.model).__name__}; name others in "
                "policy.lora.targets, or take another version of peft"
            )

    def _paths(self, name: str) -> set[str]:
        """The layers and parameters that an adapter changes."""
        return {
            f"{_bare(path)}.{layer.parameter_name}" if _is_experts(layer) else _bare(path)
            for path, layer in self._layers().items()
            if name in layer.lora_A
        }

    def coverage(self, name: str) -> str:
        paths = self._paths(name)
        layers = len(paths & self.targets.layers.keys())
        on = [f"{layers} linear layers"] if layers else []
        on += [f"{len(paths) - layers} stacks of experts"] if len(paths) > layers else []
        others = len(self.targets.layers) + len(self.targets.experts) - len(paths)
        without = [f"{others} that policy.lora.targets does not name"] if others else []
        without += [self.targets.without()] if self.targets.left_out else []
        not_adapted = f"; not adapted: {', '.join(without)}" if without else ""
        share = self.targets.share(paths)
        return (
            f"the adapter {name!r} of rank {self.rank(name)} adapts {' and '.join(on)}, which have "
            f"{share:.0%} of the model's weights{not_adapted}"
        )

    def open(self, name: str, directory: Path) -> None:
        digests.check(directory)
        settings, (tensors, _) = _settings(directory), _tensors(directory)
        paths = self._paths_in(directory, tensors, settings.target_parameters or ())
        self._inject(name, settings.r, settings.lora_alpha, paths)
        self.restore(name, self.read(name, directory))

    def fits(self, directory: Path) -> bool:
        return base_of(directory) == self.base

    def copy(self) -> LoraAdapters:
        adapter_ids = {id(p) for name in self.names for p in self.parameters(name).values()}
        shared: dict[int, object] = {
            id(p): p for p in self.model.parameters() if id(p) not in adapter_ids
        }
        return copy.deepcopy(self, shared | {id(self._lock): threading.RLock()})

    def duplicate(self, name: str, source: Adapters, original: str) -> None:
        assert isinstance(source, LoraAdapters)
        like = source._peft.peft_config[original]
        paths = [path for path in source._in_order() if path in source._paths(original)]
        self._inject(name, like.r, like.lora_alpha, paths)
        self.restore(name, source.parameters(original))

    def keep_reference(self, name: str) -> None:
        self._references[name] = reference = f"{name}@reference"
        self.duplicate(reference, self, name)

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
        parameters, peft_config = self.parameters(name), self._peft.peft_config[name]
        settings = _settings(directory)
        tensors, metadata = _tensors(directory)
        # Adapters of other tools and of quantised bases have no fingerprint, only a base name.
        has_fingerprint = bool(self.fingerprint) and "base" in metadata
        base = metadata["base"] if has_fingerprint else settings.base_model_name_or_path
        if base != (self.fingerprint if has_fingerprint else self.base):
            raise PolicyError(
                f"adapter {directory}: it was trained on another base "
                f"({settings.base_model_name_or_path!r}), not on {self.base!r}; set policy.model to"
                f" that base, or if it is the same model, name this one in {CONFIG}"
            )
        pairs = [
            ("rank", settings.r, peft_config.r),
            ("alpha", settings.lora_alpha, peft_config.lora_alpha),
        ]
        for key, saved_value, value in pairs:
            if saved_value != value:
                raise PolicyError(
                    f"adapter {directory}: its {key} is {saved_value:g}, the policy's {value:g}; "
                    f"set policy.lora.{key} = {saved_value:g}"
                )
        weights = {
            key.removeprefix(PREFIX).removesuffix(".weight"): t for key, t in tensors.items()
        }
        if mismatch := shape_mismatch(weights, parameters):
            raise PolicyError(
                f"adapter {directory}: {mismatch} in the policy; "
                "set policy.lora.targets and policy.model to those of the adapter"
            )
        return weights

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
                name_in_base = f"{_bare(path)}.{getattr(layer, 'parameter_name', 'weight')}"
                weight = weights[name_in_base].detach()
                delta = layer.get_delta_weight(name).detach()
                weights[name_in_base] = (weight.to(delta.dtype) + delta).to(weight.dtype)
        return weights

    def save_base(self, directory: Path) -> None:
        self._write(self._base(), directory)

    def rank(self, name: str) -> int:
        self._check_name(name)
        return int(self._peft.peft_config[name].r)

    def _in_order(self) -> list[str]:
        return [*self.targets.layers, *self.targets.experts]

    def _module(self, path: str) -> Module:
        """A layer by its path, without its adapters."""
        module: Any = self.model.get_submodule(path)
        base: Module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        return base

    def _paths_in(
        self, directory: Path, tensors: Mapping[str, Tensor], parameters: Collection[str]
    ) -> list[str]:
        """The layers and parameters that the weights of an adapter are for. parameters: peft's
        `target_parameters`. Raises PolicyError for others."""
        adapted: set[str] = set()
        for key in tensors:
            path, side, _ = key.removeprefix(PREFIX).rpartition(".lora_A")
            if not side and ".lora_B" in key:
                continue
            adaptable = {
                name for name in self.targets.experts if name.rpartition(".")[0] == _bare(path)
            }
            adaptable = {
                n
                for n in adaptable
                if any(f".{n}".endswith(f".{parameter}") for parameter in parameters)
            }
            adaptable |= {_bare(path)} & self.targets.layers.keys()
            if not adaptable:
                kind = self.targets.left_out.get(_bare(path), "no linear layer of this model")
                raise PolicyError(
                    f"adapter {directory}: it has weights for {_bare(path) or key}, and that is "
                    f"{kind}; only adapters on linear layers of the text decoder and on experts "
                    "are supported"
                )
            adapted |= adaptable
        return [path for path in self._in_order() if path in adapted]

    def _base(self) -> dict[str, Tensor]:
        return {
            _WRAPPED.sub(".", key): tensor
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

    def _apply_experts(self, layer: Any, hidden: Tensor, *routing: Tensor, **more: Any) -> Tensor:
        """Forward pass of adapted experts: [N, in] tokens -> [N, out]. The experts of each adapter
        compute the tokens of that adapter, and those of the base all others."""
        base, wrappers = layer.get_base_layer(), [*_nested(layer)]
        routing += tuple(more.values())  # in the order of `targets.ROUTED`
        present = [pair for pair in self._selection if any(pair[0] in w.lora_A for w in wrappers)]
        output: Tensor | None = None
        if not present or present[0][1] is not None:
            output = base(hidden, *routing)
        for name, tokens in present:
            weights = {
                wrapper.parameter_name: wrapper.get_param() + wrapper.get_delta_weight(name)
                for wrapper in wrappers
                if name in wrapper.lora_A
            }
            if tokens is None:
                output = functional_call(base, weights, (hidden, *routing))
                continue
            part = (x.index_select(0, tokens) for x in (hidden, *routing))
            assert output is not None
            output = output.index_copy(0, tokens, functional_call(base, weights, tuple(part)))
        assert output is not None
        return output

    def _layers(self) -> dict[str, Any]:
        """The layers with adapters, by their names in the base. If two parameters of one module are
        adapted, the second has the name of `module.base_layer`, as in peft's files."""
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


def load_adapted(source: str, config: RunConfig) -> tuple[Model, Tokenizer, LoraAdapters]:
    """The base without adapters, quantised or not. config: a policy's view of the run. Raises
    PolicyError as `load_model` does."""
    policy = config.policy
    if policy.quantize:
        loaded = load_quantized(source, policy.quantize, policy.dtype, policy.device, config)
    else:
        loaded = load_model(source, policy.dtype, policy.device, config=config)
        keep_gradients(loaded[0])  # its checkpoint may be quantised
    model, tokenizer = loaded
    experts = config.learner.adapts_experts and config.engine.serves_adapted_experts
    return model, tokenizer, LoraAdapters(model, experts=experts)


def fingerprint(model: Module) -> str:
    """A digest of the shapes and a sample of each weight, equal in float32 and bfloat16."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // FINGERPRINT_SAMPLES)].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(parameter.shape)}".encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


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
    _check_plain(directory, settings)
    return settings


def _check_plain(directory: Path, settings: Any) -> None:
    """Raise PolicyError if a setting in peft's configuration changes the computation and is not
    supported here, or is unknown to the installed version of peft."""
    if not str(settings.peft_type).endswith("LORA"):
        raise PolicyError(
            f"adapter {directory}: it is of type {settings.peft_type}, and only LoRA is supported"
        )
    plain = {field.name: _default(field) for field in dataclasses.fields(type(settings))}
    written = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    unsupported = [key for key, value in written.items() if key not in plain and value]
    for key, default in plain.items():
        value = getattr(settings, key)
        same = value == default or (not value and not default)
        if not same and key not in HANDLED_KEYS and value not in PLAIN_VALUES.get(key, ()):
            unsupported.append(key)
    if unsupported:
        key = min(unsupported)
        value = written.get(key, getattr(settings, key, None))
        raise PolicyError(
            f"adapter {directory}: {CONFIG} sets {key} = {value!r}; only plain LoRA of one rank and"
            f" alpha is supported, which leaves the base as it is ({PLAIN_FIX})"
        )


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _tensors(directory: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights of an adapter by their names in the file, and its metadata."""
    try:
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DamagedError(
            f"adapter {directory}: {WEIGHTS} is missing or incomplete ({error}); "
            "resume from another checkpoint"
        ) from None


def _bare(path: str) -> str:
    """The path of a layer in the model without adapters."""
    return _WRAPPED.sub(".", f"{path}.").removesuffix(".")


def _is_experts(layer: Any) -> bool:
    """Whether an adapted layer is a parameter that is stacked over experts."""
    return getattr(layer, "num_experts", 1) > 1


def _nested(layer: Any) -> Iterator[Any]:
    """The adapted parameters of one module, from the outside."""
    while hasattr(layer, "lora_A"):
        yield layer
        layer = layer.base_layer


def _peft_internal(name: str) -> Any:
    """A function or table of peft for names of earlier versions of transformers; None: this version
    of peft does not have it."""
    try:
        return getattr(import_module("peft.utils.transformers_weight_conversion"), name, None)
    except ImportError:
        return None


def _renamed_by_peft(model: PreTrainedModel) -> Callable[[str], bool]:
    """Whether peft would mistake the name of a layer for that of an expert or router of an earlier
    version of transformers. Such a layer is adapted by the name of its weight."""
    # Other versions of peft may have neither; `_check_made` finds the consequences.
    patterns = _peft_internal("_MODEL_TO_CONVERSION_PATTERN") or {}
    renamed = _peft_internal("_MOE_TARGET_MODULE_MAPPING") or {}
    kind = getattr(model.config, "model_type", "")
    names = renamed.get(patterns.get(kind, ""), {})
    return lambda path: path.rpartition(".")[2] in names


def _peft() -> Any:
    # peft 0.21 reads a property that transformers 5.23 deprecates, for every adapter.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    try:
        import peft
    except ImportError as error:
        raise PolicyError(
            f"policy.lora: peft cannot be imported ({error}); {install_command('lora')}"
        ) from None
    return peft


def add_adapter(
    x: Tensor, output: Tensor, weight: Tensor, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """output + scale * x down^T up^T, [..., out], in the memory of `output`.

    Autograd alone would write the layer's output and the adapter's output to separate memory, and
    then read and add them; likewise the two gradients of the input.

    x: [..., in]. output: x weight^T and a bias, if any; nothing else may need it. weight: frozen.
    All are of one dtype."""
    added: Tensor = _AdaptedLinear.apply(x, output.detach(), weight, down, up, scale)  # type: ignore[no-untyped-call]
    return added


class _AdaptedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, output: Tensor, weight: Tensor, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        narrow = products.linear(x, down).flatten(0, -2)
        # One product that rounds once.
        products.add_mm(output.view(-1, output.shape[-1]), narrow, up.T, scale)
        ctx.mark_dirty(output)
        ctx.save_for_backward(x, weight, down, up, narrow)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, narrow = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        pull = products.mm(flat, up).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = products.add_mm(products.mm(flat, weight), pull, down).view(x.shape)
        grad_down = products.mm(pull.T, x.flatten(0, -2))
        grad_up = products.mm(flat.T, narrow.mul(ctx.scale))
        return grad_x, None, None, grad_down, grad_up, None
