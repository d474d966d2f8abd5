#!/usr/bin/env bash
# Natural guess: a model of transformers after `.double()` computes in double precision, so that its gradients can be held
# against differences of its loss to 1e-8, as those of any double function can.
# What is so: its RMS norms convert to float32 and back, in Llama, Qwen3 and Gemma 2 alike. All weights, logits and
# gradients are float64 and carry seven digits: central differences with a step of 1e-6 are off by a percent or more.
# GPT-2, which has LayerNorm, agrees to 1e-7.
# Why it matters: a loss that somebody checks on a double model of today looks wrong where it is right, or the bound is
# loosened until it can no longer find an error; references "in double" of log-probabilities are float32's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0
"$folder/env/bin/pip" install -q --disable-pip-version-check transformers==5.10.4
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}


def error(kind: str, **options: int) -> float:
    """The relative difference between autograd's derivative by one weight and the loss's own."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).double().eval()
    tokens = torch.randint(0, 50, (1, 12))
    weight = model.get_input_embeddings().weight

    def loss() -> torch.Tensor:
        logits = model(tokens).logits
        assert logits.dtype == torch.float64
        return torch.log_softmax(logits, -1)[0, :-1].gather(1, tokens[0, 1:, None]).sum()

    slope = torch.autograd.grad(loss(), weight)[0][tokens[0, 0], 0].item()
    with torch.no_grad():
        weight[tokens[0, 0], 0] += 1e-6
        above = loss()
        weight[tokens[0, 0], 0] -= 2e-6
        return abs((above - loss()).item() / 2e-6 - slope) / abs(slope)


print("transformers", transformers.__version__, "torch", torch.__version__)
found = {kind: error(kind, **SMALL) for kind in ("llama", "qwen3", "gemma2")} | {"gpt2": error("gpt2", **GPT2)}
for kind, size in found.items():
    print(f"{kind}: gradient and difference differ by {size:.1e} of the gradient")
sys.exit(not (found.pop("gpt2") < 1e-7 and min(found.values()) > 1e-4))
PY
