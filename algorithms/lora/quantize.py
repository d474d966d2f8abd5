"""A frozen base with 4-bit or 8-bit weights, by bitsandbytes through transformers.

Adapters on it are trained in the policy's dtype (QLoRA, arXiv 2305.14314). Other servers, merges
and exports get these weights dequantised, not the original ones, so that the policy is the same.
"""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import BitsAndBytesConfig

from agentrl.algorithms.model.load import DTYPES, Model, Tokenizer, device_of, load_model
from agentrl.config import RunConfig


def load_quantized(
    source: str, bits: str, dtype: str, device: str, config: RunConfig | None = None
) -> tuple[Model, Tokenizer]:
    """As `load_model`, in "4bit" or "8bit"."""
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
    """Before the first pass: one without gradients repacks 4-bit weights for some CPUs, and the
    kernel for these, which later passes use as well, passes no gradient on."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantized(model: Any) -> bool:
    return getattr(model, "hf_quantizer", None) is not None


def dense_state(model: Any) -> dict[str, Tensor]:
    """The model's state with weights dequantised to the dtype of its embeddings, without scales."""
    state: dict[str, Tensor] = model.state_dict()  # also unpacks weights packed for CPU kernels
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
    whole = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    del config.quantization_config
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
