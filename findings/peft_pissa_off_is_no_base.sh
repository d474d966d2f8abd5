#!/usr/bin/env bash
# Natural guess: inside `disable_adapter()` of a peft model the base model answers, so that it serves as the reference of a
# KL penalty without a second copy, as trainers of LoRA use it.
# What is so: with init_lora_weights="pissa" or "olora" the adapter starts as a part of each weight, the main one with
# "pissa", that is taken out of the base. With the adapter the model is the base; without it, it is what was left over, from
# the first step on and without a warning. The default, "gaussian" and "orthogonal" leave the base as it is.
# Why it matters: these starts are offered as drop-in ones that learn faster. The KL at step 0 is several nats instead of
# 0, and the penalty pulls the policy towards a damaged model, with the reward as the only thing against it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.10.4 peft==0.21.2 \
    2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys
from copy import deepcopy
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

print(*(f"{name} {version(name)}" for name in ("peft", "transformers", "torch")), sep=", ")
torch.manual_seed(0)
shape = Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.5,
)
base = Qwen2ForCausalLM(shape).eval()
tokens = torch.randint(64, (4, 16))


@torch.no_grad()
def log_probs(model: torch.nn.Module) -> torch.Tensor:
    return model(tokens).logits.log_softmax(-1)


def kl(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.exp() * (one - other)).sum(-1).mean().item()


kept, moved = [], []
truth = log_probs(base)
for start in (True, "gaussian", "orthogonal", "olora", "pissa"):
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=start)
    policy = get_peft_model(deepcopy(base), settings).eval()
    with policy.disable_adapter():
        reference = log_probs(policy)
    on, off = kl(log_probs(policy), truth), kl(reference, truth)
    print(f"{start!r:>12}: KL to the base {abs(on):.5f}, with the adapter disabled {abs(off):.5f}")
    assert abs(on) < 1e-4
    (kept if abs(off) < 1e-4 else moved).append(start)
sys.exit((kept, moved) != ([True, "gaussian", "orthogonal"], ["olora", "pissa"]))
PY
