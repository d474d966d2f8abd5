"""Every class of transformers' `MODEL_FOR_CAUSAL_LM_MAPPING`, small and random.

A configuration begins with the defaults of its class. Sizes that `SIZES` names are replaced, in the
configurations inside it as well, and then those of the class in `CLASSES`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from tests.tiny_models import trained_tokenizer

VOCABULARY = 128

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,  # large enough that contexts matter and tokens differ
    "init_std": 0.1,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "n_inner": 48,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24,
    "dff": 48,
    "dim_ff": 48,
    "dim_head": 8,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "kv_channels": 8,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "state_size": 8,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "type_vocab_size": 2,
    # Shorter than the rows of a test, so that a layer that forgets them is seen.
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "index_topk": 8,
    "local_attention": 8,
    "window_size": 8,
    # The first token of a sequence reads what its place says, with no switch of its own.
    "is_decoder": True,
}

LOCAL = ["sliding_attention", "full_attention"]
LINEAR = ["linear_attention", "full_attention"]
GEMMA4 = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 8,
    "layer_types": LOCAL,
}
ASSISTANT = GEMMA4 | {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0}
# Of a composition, the class reads the configuration of its decoder.
DECODERS = ("musicgen", "musicgen_melody")
# What cannot be built here, and why: its folder has a configuration and no weights.
UNBUILT = {"gemma3n": "its vision tower needs timm"}
# What the sizes above do not fit, and at least one layer of each kind that the class has.
CLASSES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1, "layer_types": LOCAL},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
        "patch_size": 4,
    },
    "cohere_compass_text": {
        "layer_types": LOCAL,
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": 1e4} for k in LOCAL},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4,
                       "moe_top_k": 2},
    },
    "deepseek_v2": {"first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "exaone4": {"layer_types": LOCAL, "sliding_window_pattern": 2},
    "exaone_moe": {"first_k_dense_replace": 1, "layer_types": LOCAL},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma2": {"layer_types": LOCAL},
    "gemma3": {"text_config": {"layer_types": LOCAL}},
    "gemma3_text": {"layer_types": LOCAL},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY,
                                "hidden_size_per_layer_input": 8, "layer_types": LOCAL,
                                "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0]}},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY,
                     "hidden_size_per_layer_input": 8, "layer_types": LOCAL, "laurel_rank": 4,
                     "activation_sparsity_pattern": [0.5, 0.0]},
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "gemma4_assistant": {"text_config": ASSISTANT, "backbone_hidden_size": 32,
                         "num_centroids": 4, "centroid_intermediate_top_k": 2},
    "gemma4_unified": {"text_config": {"global_head_dim": 8, "layer_types": LOCAL}},
    "gemma4_unified_text": {"global_head_dim": 8, "layer_types": LOCAL},
    "gemma4_unified_assistant": {
        "text_config": {"global_head_dim": 8, "layer_types": LOCAL, "num_kv_shared_layers": 2},
        "backbone_hidden_size": 32, "num_centroids": 4, "centroid_intermediate_top_k": 2},
    "glm4_moe": {"first_k_dense_replace": 1},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v3": {"first_k_dense_replace": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1, "mamba_dt_rank": 4},
    "laguna": {"mlp_layer_types": ["dense", "sparse"], "layer_types": LOCAL},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"text_config": {"num_hidden_layers": 4}},
    "llama4_text": {"num_hidden_layers": 4},
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 2, "n_routed_experts": 4},
    "mamba2": {"num_heads": 8},
    "minimax": {"layer_types": LINEAR},
    "modernbert-decoder": {"layer_types": LOCAL},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1,
        "moe_shared_expert_intermediate_size": 24,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    },
    "olmo3": {"layer_types": LOCAL},
    "olmo_hybrid": {"layer_types": LINEAR},
    "phi4_multimodal": {
        "audio_config": {"num_blocks": 1, "ext_pw_out_channel": 16,
                         "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16},
    },
    "qwen3_5": {"text_config": {"layer_types": LINEAR}},
    "qwen3_5_text": {"layer_types": LINEAR},
    "qwen3_5_moe": {"text_config": {"layer_types": LINEAR}},
    "qwen3_5_moe_text": {"layer_types": LINEAR},
    "qwen3_next": {"layer_types": LINEAR},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 8},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8],
        "max_position_embeddings": 64,
                 "feed_forward_size": 48, "attention_head_size": 8,
                 "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8,
                 "attn_layers": ["local", "lsh"], "num_buckets": 4},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roc_bert": {"shape_vocab_size": 16, "shape_embed_dim": 8, "pronunciation_vocab_size": 16,
                 "pronunciation_embed_dim": 8},
    "smollm3": {"no_rope_layers": [1, 0]},
    "solar_open": {"first_k_dense_replace": 1},
    "xlm": {"emb_dim": 32},
    "xlnet": {"d_inner": 48},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"num_hidden_layers": 5, "mamba_dt_rank": 4, "attn_layer_period": 2,
              "attn_layer_offset": 1, "attention_head_dim": 16,
              "use_mamba_kernels": False},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "adapter_rank": 4},
}  # fmt: skip


def names() -> list[str]:
    """The model types of transformers' mapping of causal language models."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    """The class of a model type."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def small_config(model_type: str) -> PretrainedConfig:
    """The configuration of the class, with small sizes."""
    kind, own = CONFIG_MAPPING[model_type], CLASSES.get(model_type, {})
    kind = _network(model_type).config_class if model_type in DECODERS else kind
    config: PretrainedConfig = kind(**_sizes(kind(), own))
    return config


def build(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """A model of the class with random weights, in float32 and eval mode."""
    config = small_config(model_type)
    network = _network(model_type) if model_type in DECODERS else None
    make = network._from_config if network else AutoModelForCausalLM.from_config
    torch.manual_seed(seed)
    model: PreTrainedModel = make(config, dtype=torch.float32)
    return model.eval()


def save(model_type: str, folder: Path) -> None:
    """Write a model of the class and a tokenizer, as a user has them: with the configuration of the
    whole, of which the model may be a part."""
    if model_type in UNBUILT:
        folder.mkdir(exist_ok=True)
        save_file({}, folder / "model.safetensors", {"format": "pt"})
    else:
        build(model_type).save_pretrained(folder)
    small_config(model_type).save_pretrained(folder)
    trained_tokenizer().save_pretrained(folder)


def _network(model_type: str) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]


def _sizes(default: PretrainedConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the configuration's class."""
    kind = type(default)  # before transformers 5.4 it is no dataclass
    fields = getattr(kind, "__dataclass_fields__", None) or signature(kind).parameters
    found = {key: value for key, value in SIZES.items() if key in fields} | dict(own)
    for key, inner_kind in default.sub_configs.items():
        inner = getattr(default, key, None)
        if inner is None and key in own:
            inner = inner_kind()
        if isinstance(inner, PretrainedConfig):
            found[key] = _sizes(inner, own.get(key, {})) | {"model_type": inner.model_type}
    if {"kv_lora_rank", "num_key_value_heads"} <= found.keys():  # keys are not shared by heads
        found["num_key_value_heads"] = found["num_attention_heads"]
    return copy.deepcopy(found)
