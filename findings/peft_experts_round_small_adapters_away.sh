#!/usr/bin/env bash
# Natural guess: a LoRA adapter on the experts of a mixture (target_parameters) computes as one on a linear layer does,
# y = W x + s B (A x), so that a small adapter has a small effect.
#
# What is so (peft 0.21, transformers 5): the stacked weights of the experts are replaced by W + s B A in the dtype of W.
# In bfloat16, which has 8 bits, what is smaller than 1/512 of a weight is rounded away: the output has the same bits as
# that of the base, though the same adapter on the same layer as an nn.Linear changes it.
#
# Why it matters: B starts at 0, and reinforcement learning trains at small rates. For the first steps the policy of a
# bfloat16 mixture does not move at all; then it moves in jumps, weight by weight.
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
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

print(f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
shape = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    initializer_range=0.2,
)
tokens = torch.arange(3, 40)[None]


def effect(dtype, size, **targets):
    """The largest change of a logit by an adapter whose B A has elements of about this size."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(shape)
    with torch.no_grad():  # no weight is so small that the adapter is large beside it
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.sign() * parameter.abs().clamp(min=0.1))
    model = model.to(dtype).eval()
    with torch.no_grad():
        before = model(tokens).logits.float()
        made = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, **targets))
        for name, parameter in made.named_parameters():
            if ".lora_A" in name:
                parameter.copy_(parameter.sign())
            if ".lora_B" in name:
                parameter.fill_(size / 4)
        return float((made(tokens).logits.float() - before).abs().max())


size = 1e-4  # beside weights of at least 0.1
experts = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
found = {
    "experts, float32": effect(torch.float32, size, **experts),
    "experts, bfloat16": effect(torch.bfloat16, size, **experts),
    "linear layers, bfloat16": effect(torch.bfloat16, size, target_modules=["q_proj", "v_proj", "o_proj"]),
}
for name, change in found.items():
    print(f"{name}: the largest change of a logit is {change:.2g}")
expected = found["experts, bfloat16"] == 0 < min(found["experts, float32"], found["linear layers, bfloat16"])
print("as described" if expected else "the behaviour has changed")
sys.exit(not expected)
PYTHON
