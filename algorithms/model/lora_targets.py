"""Targets of adapters: linear layers of a model and the stacked weights of its experts; and frozen
bases with 4-bit or 8-bit weights.

Routers are excluded, because an adapter there changes which experts a token visits. Only layers
that a forward pass calls are targets: some models read the weights of a layer without calling it,
so that an adapter on it would be trained, saved and merged without any effect.

Quantized bases are bitsandbytes' through transformers. Adapters on them are trained in the policy's
dtype (QLoRA, arXiv 2305.14314). Other servers, merges and exports get these weights dequantised,
not the original ones, so that the policy does not change.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.load import DTYPES, Model, device_of, load_model
from agentrl.core.config import RunConfig
from agentrl.core.errors import PolicyError, nearest
from agentrl.core.types import one_line


def load_quantized(
    source: str, bits: str, dtype: str, device: str, config: RunConfig | None = None
) -> tuple[Model, Tokenizer]:
    """Like `load_model`, with weights in "4bit" or "8bit"."""
    quantized = {
        "quantization_config": quantization(bits, DTYPES[dtype]),
        "device_map": {"": device_of(device)},
    }
    model, tokenizer = load_model(source, dtype, device, quantized=quantized, config=config)
    keep_gradients(model)
    return model, tokenizer


def quantization(bits: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Settings for "4bit" (NF4, with quantised scales) or "8bit" (LLM.int8())."""
    if bits == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_gradients(model: Any) -> None:
    """Call before the first pass: a pass without gradients repacks 4-bit weights for some CPUs, and
    the kernel for repacked weights, which later passes also use, does not propagate gradients."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantized(model: Any) -> bool:
    return getattr(model, "hf_quantizer", None) is not None


def dense_state(model: Any) -> dict[str, Tensor]:
    """The model's state with weights dequantised to the dtype of its embeddings, without scales."""
    # Reading it also unpacks weights packed for CPU kernels.
    state: dict[str, Tensor] = model.state_dict()
    if not is_quantized(model):
        return state
    from peft.utils.integrations import dequantize_bnb_weight

    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    state = {name: state[name] for name, _ in tensors if name in state}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")  # `.weight` of a peft layer is its base's
        if weight is not None and not weight.is_floating_point():
            dense = dequantize_bnb_weight(weight, getattr(module, "state", None)).detach()
            state[f"{path}.weight"] = dense.to(model.get_input_embeddings().weight.dtype)
    return state


def save_dense(model: Any, directory: Path, weights: dict[str, Tensor]) -> None:
    """Write dense weights of a quantised model, by checkpoint name, to a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    del config.quantization_config
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


# Names of routers: of the linear layer itself, or of a module around it.
ROUTER = re.compile(r"(^|\.)(\w*router|gate|wg)(\.|$)")
# Arguments of experts that are called with tokens, and the experts of each.
ROUTED = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
# Models in which peft refuses this layer, because the kernels for GPUs read its weight.
MAMBA, MAMBA_UNCALLED = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "out_proj"
PROBE_TOKENS = 160  # more than the blocks in which models compress their keys

ROUTERS = "routers"
UNCALLED = "layers whose weights the model reads without calling them"
OTHER_SUM = "layers that compute another product than a linear layer's"
STACKED = "weights that are stacked over experts, or by head"
UNSERVED = (
    "stacks of experts (adapters on them need the torch learner, and the embedded engine or "
    "engine.vllm.sync = 'reload')"
)


@dataclass(frozen=True, slots=True)
class Targets:
    """The possible targets of adapters, by path in the model without adapters, with numbers of
    weights."""

    layers: dict[str, int]
    experts: dict[str, int]  # parameters, [experts, in, out] or [experts, out, in]
    left_out: dict[str, str] = field(default_factory=dict)  # path -> a kind, as above
    total: int = 0  # weights of the model

    def chosen(self, targets: Sequence[str], base: str) -> list[str]:
        """Paths of layers and parameters by names of layers or experts; no names: all. Raises
        PolicyError for a name of neither."""
        if not targets:
            if not self.layers and not self.experts:
                raise PolicyError(
                    f"policy.lora: {base!r} has nothing that an adapter could be on, only "
                    f"{self.without() or 'a head'}; train all its weights (policy.lora.rank = 0)"
                )
            return [*self.layers, *self.experts]
        paths: dict[str, None] = {}
        for target in targets:
            matching = [path for path in self.layers if _is_named(path, target)]
            matching += [path for path in self.experts if _is_within(path, target)]
            if not matching:
                raise self._unknown(target, base)
            paths |= dict.fromkeys(matching)
        return list(paths)

    def _unknown(self, target: str, base: str) -> PolicyError:
        kinds = {kind for path, kind in self.left_out.items() if _is_within(path, target)}
        if kinds:
            return PolicyError(
                f"policy.lora.targets: no adapter can be on {target!r} of {base!r}, which are "
                f"{min(kinds)}; leave it out"
            )
        names = {path.rpartition(".")[2] for path in (*self.layers, *self.experts)}
        return PolicyError(
            f"policy.lora.targets: {base!r} has no linear layers {target!r} beside its head; "
            f"{nearest(target, names)}"
        )

    def share(self, paths: Iterable[str]) -> float:
        """The share of the model's weights that belong to these layers and parameters."""
        sizes = self.layers | self.experts
        return sum(sizes[path] for path in paths) / max(1, self.total)

    def without(self) -> str:
        """The layers that cannot have an adapter, with numbers: "2 routers"."""
        counts = Counter(self.left_out.values())
        return ", ".join(f"{number} {kind}" for kind, number in counts.items())


def find_targets(model: PreTrainedModel, *, experts: bool) -> Targets:
    """The targets in the text decoder of a model that has no adapters. experts: whether engine and
    learner can adapt experts."""
    text = set(map(id, (model.get_decoder() or model.base_model).modules()))
    head = model.get_output_embeddings()
    named = [(path, m) for path, m in model.named_modules() if id(m) in text and m is not head]
    called = _called(model)
    layers, stacked, left_out = dict[str, int](), dict[str, int](), dict[str, str]()
    for path, module in named:
        if isinstance(module, Linear | Conv1D):
            reason = ROUTERS if ROUTER.search(path) else "" if path in called else UNCALLED
            if reason := reason or ("" if _is_linear(module) else OTHER_SUM):
                left_out[path] = reason
            else:
                layers[path] = size_of(module)
            continue
        for name, parameter in _stacked(module):
            reason = "" if _is_routed(module) else STACKED
            if reason := reason or ("" if experts else UNSERVED):
                left_out[f"{path}.{name}"] = reason
            else:
                stacked[f"{path}.{name}"] = parameter.numel()
    return Targets(layers, stacked, left_out, sum(map(size_of, _owners(model))))


def size_of(module: Module) -> int:
    """The number of weights of a module itself, also of a quantised layer."""
    count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if isinstance(module, Linear) and not module.weight.is_floating_point():
        return module.in_features * module.out_features
    return count


def _is_named(path: str, target: str) -> bool:
    return f".{path}".endswith(f".{target}")


def _is_within(path: str, target: str) -> bool:
    """Whether a parameter has this name, or its module has."""
    return _is_named(path, target) or _is_named(path.rpartition(".")[0], target)


def _owners(model: PreTrainedModel) -> Iterator[Module]:
    """The modules of a model, except a head that is tied to its embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", 0)
    return (module for module in model.modules() if not (tied and module is head))


def _stacked(module: Module) -> list[tuple[str, Tensor]]:
    """The parameters of a module that are stacks of matrices."""
    if type(module).__module__.startswith("torch."):  # convolutions
        return []
    parameters = module.named_parameters(recurse=False)
    return [(name, p) for name, p in parameters if p.dim() == 3 and min(p.shape) > 1]


def _is_routed(module: Module) -> bool:
    """Whether a module is called with tokens and the experts of each."""
    arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
    return arguments in ROUTED and all(p.is_floating_point() for _, p in _stacked(module))


def _is_linear(layer: Linear | Conv1D) -> bool:
    """Whether a layer computes x W^T + b; classes derived from `Linear` may do something else."""
    if type(layer) in (Linear, Conv1D) or not layer.weight.is_floating_point():
        return True
    assert isinstance(layer, Linear)
    x = torch.linspace(-1, 1, 3 * layer.in_features).view(3, -1).to(layer.weight)
    with torch.no_grad():
        wanted = linear(x, layer.weight, layer.bias)
        try:
            return torch.allclose(layer(x), wanted, rtol=1e-2, atol=1e-2)
        except (RuntimeError, ValueError, TypeError):  # the layer expects another input shape
            return False


def _called(model: PreTrainedModel) -> set[str]:
    """Paths of the linear layers that a forward pass calls."""
    called: set[str] = set()
    mamba = getattr(model.config, "model_type", "") in MAMBA
    hooks = [
        module.register_forward_pre_hook(lambda _, __, path=path: called.add(path))
        for path, module in model.named_modules()
        if isinstance(module, Linear | Conv1D)
        if not (mamba and path.endswith(f".{MAMBA_UNCALLED}"))
    ]
    context = context_length(model) or PROBE_TOKENS  # below 0: without a limit
    size = min(context, PROBE_TOKENS) if context > 0 else PROBE_TOKENS
    tokens = torch.arange(size, device=model.device) % model.get_input_embeddings().weight.shape[0]
    try:
        with torch.no_grad():
            model.base_model(input_ids=tokens[None], use_cache=False)
    except Exception as error:  # transformers documents no exception types
        raise PolicyError(
            f"{type(model).__name__}: it cannot read text alone "
            f"({type(error).__name__}: {one_line(str(error))}); choose another model"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return called
