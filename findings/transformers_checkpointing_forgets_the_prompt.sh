#!/usr/bin/env bash
# Natural guess: gradient checkpointing changes the memory and the time of a backward pass, not what `generate` writes.
# What is so: with transformers 5.10.4, `generate` of a model in train mode with gradient checkpointing keeps no cache,
# which is logged as a warning, and yet hands the model the last token alone. From the second token on, each is drawn as
# if the one before it were the whole sequence: prompt and answer are forgotten. 5.24.0 keeps the cache, and so does
# eval mode in both.
# Why it matters: who samples rollouts between two updates without model.eval() trains on text that depends on no prompt.
# Rewards fall as those of a bad policy, and the log-probs of generate are not those of the learner.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat >"$folder/sampled.py" <<'PY'
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
shape = Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.5, eos_token_id=None,
)
model = Qwen2ForCausalLM(shape)
prompt = torch.arange(1, 9)[None]
PROMPT, NEW = prompt.shape[1], 8


@torch.no_grad()
def log_probs(tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).logits[0].log_softmax(-1)


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


model.gradient_checkpointing_enable()
for mode in ("eval", "train"):
    model.train(mode == "train")
    drawn = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )
    later = torch.cat(drawn.logits)[1:].log_softmax(-1)
    whole = log_probs(drawn.sequences)[PROMPT:-1]
    alone = torch.cat([log_probs(drawn.sequences[:, [at]]) for at in range(PROMPT, PROMPT + NEW - 1)])
    given = {"the whole sequence": whole, "the last token": alone}
    same = [name for name, other in given.items() if error(later, other) < 1e-3]
    print(f"transformers {transformers.__version__}, {mode} mode: tokens after the first are drawn given {' and '.join(same)}")
PY
for version in 5.10.4 5.24.0; do
    "$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 "transformers==$version" 2>&1 |
        grep -v WARNING || true
    "$folder/env/bin/python" "$folder/sampled.py" 2>/dev/null | tee -a "$folder/seen"
done
diff - "$folder/seen" <<'EOF'
transformers 5.10.4, eval mode: tokens after the first are drawn given the whole sequence
transformers 5.10.4, train mode: tokens after the first are drawn given the last token
transformers 5.24.0, eval mode: tokens after the first are drawn given the whole sequence
transformers 5.24.0, train mode: tokens after the first are drawn given the whole sequence
EOF
