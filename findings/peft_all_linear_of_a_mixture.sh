#!/usr/bin/env bash
# Natural guess: target_modules="all-linear" puts a LoRA adapter of rank r on every nn.Linear of a model but its head,
# and on nothing else; a list such as ["gate_proj", "up_proj", "down_proj"] puts one on the layers with these names.
#
# What is so (peft 0.21, transformers 5): in many mixtures of experts (DeepSeek-V3, Qwen3-MoE, GLM-4-MoE, OLMoE,
# Mixtral ...) these names are taken for those that the experts had in transformers 4. So there is
# an adapter on the router, which is no nn.Linear, and one of twice the rank on the stacked experts; and the layers that
# do have these names, of the shared expert and of dense layers, have none.
#
# Why it matters: reinforcement learning through an adapted router changes which experts a token visits, so the engine
# and the learner must agree on it exactly; and a third of the layers that were asked for are never trained, in silence.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.10.4 peft==0.21.2 2>&1 | grep -v WARNING || true
"$folder/env/bin/python" - <<'PYTHON'
import sys

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import Linear
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

print(f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
shape = DeepseekV3Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
    first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8,
)
with torch.device("meta"):
    model = DeepseekV3ForCausalLM(shape)
layers = {name for name, module in model.named_modules() if isinstance(module, Linear)} - {"lm_head"}
made = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), low_cpu_mem_usage=True)
ranks = {}
for name, module in made.base_model.model.named_modules():
    if hasattr(module, "lora_A") and "default" in module.r:
        own = name.replace(".base_layer", "") + ("." + module.parameter_name if hasattr(module, "parameter_name") else "")
        ranks[own] = module.r["default"]
missing = sorted(layers - ranks.keys())
print("adapters:", *(f"\n  {name}: rank {rank}" for name, rank in sorted(ranks.items())))
print("nn.Linear without one:", *(f"\n  {name}" for name in missing))
block, names = "model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")
expected = (
    ranks.get(f"{block}.gate.weight") == 4
    and ranks.get(f"{block}.experts.gate_up_proj") == 8
    and {f"{block}.shared_experts.{name}" for name in names} <= set(missing)
    and {f"model.layers.0.mlp.{name}" for name in names} <= set(missing)
)
print("as described" if expected else "the behaviour has changed")
sys.exit(not expected)
PYTHON
