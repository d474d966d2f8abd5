"""Megatron-Core without a GPU and without TransformerEngine, for tests of verl's Megatron engine.

verl loads it by `VERL_USE_EXTERNAL_MODULES=verl_cpu,megatron_cpu`. Layers are Megatron-Core's own
instead of TransformerEngine's; float32, which verl refuses, is computed with; and whatever is asked
for on a CUDA device is made on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from mbridge.core import llm_bridge
from mbridge.core.bridge import Bridge
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.overrides import TorchFunctionMode
from verl.workers.config import McoreEngineConfig

# TransformerEngine fuses these norms into the layers behind them.
FUSED = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


class _OnCPU(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*args, **named)


_OnCPU().__enter__()
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # type: ignore[assignment]
random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
torch.nn.Module.cuda = torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment]

_type = torch.Tensor.type


def _cuda_type(self: torch.Tensor, *given: Any, **named: Any) -> Any:
    """Its optimizer takes tensors whose type says CUDA."""
    found = _type(self, *given, **named)
    named_so = isinstance(found, str) and "cuda" not in found
    return found.replace("torch.", "torch.cuda.") if named_so else found


torch.Tensor.type = _cuda_type  # type: ignore[assignment]

_layers = llm_bridge.get_gpt_decoder_block_spec


def _own_layers(config: Any, use_transformer_engine: bool = True, **rest: Any) -> Any:
    return _layers(config, use_transformer_engine=False, **rest)


llm_bridge.get_gpt_decoder_block_spec = _own_layers

_names = Bridge._weight_name_mapping_mcore_to_hf


def _unfused(self: Bridge, name: str) -> Any:
    for own, fused in FUSED.items():
        name = name.replace(own, fused)
    return _names(self, name)


Bridge._weight_name_mapping_mcore_to_hf = _unfused

_attention = DotProductAttention.forward


def _causal(
    self: Any, query: Any, key: Any, value: Any, mask: Any, *rest: Any, **named: Any
) -> Any:
    """verl's mask has TransformerEngine's shape; rows are padded behind, so causal is enough."""
    return _attention(self, query, key, value, None, *rest, **named)


DotProductAttention.forward = _causal

_checked = McoreEngineConfig.__post_init__


def _float32(self: McoreEngineConfig) -> None:
    object.__setattr__(self, "dtype", "bfloat16")
    _checked(self)
    object.__setattr__(self, "dtype", "float32")


McoreEngineConfig.__post_init__ = _float32
# In float32 its master weights are the model's own, which it would set as if they were copies.
DistributedOptimizer._set_main_param_and_optimizer_states = torch.no_grad()(
    DistributedOptimizer._set_main_param_and_optimizer_states
)

_load = DistributedOptimizer.load_state_dict


def _own_steps(self: DistributedOptimizer, state: Any) -> None:
    """Without TransformerEngine's Adam, all parameters get one counter, of the present step."""
    step = float(state["optimizer"]["param_groups"][0]["step"])
    _load(self, state)
    for each in self.optimizer.state.values():
        each["step"] = torch.tensor(step)


DistributedOptimizer.load_state_dict = _own_steps
