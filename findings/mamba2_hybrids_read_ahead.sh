#!/usr/bin/env bash
# Guess: a causal language model computes a token's probabilities from the tokens before it, however long the sequence is.
# So it is: the state-space layers of Zamba2 and Nemotron-H, as transformers computes them in PyTorch (without the kernels of
#   `mamba_ssm`, so on every CPU), pass states between chunks along the wrong dimension: beyond `chunk_size` tokens a position
#   reads tokens after it. Mamba2, with the same recurrence, does not. float64 shows that it is no rounding.
# Why it matters: answers are sampled token by token and trained in one pass over the whole row. Where the row is longer than a
#   chunk, the log-probs in training are of another distribution than the one sampled from, with no error anywhere.
set -eu
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 transformers==5.10.4 >pip.txt 2>&1 || { cat pip.txt; exit 2; }
cat > try.py <<'PYTHON'
import torch, transformers
from transformers import AutoModelForCausalLM, Mamba2Config, NemotronHConfig, Zamba2Config

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
print("torch", torch.__version__, "transformers", transformers.__version__)
small = dict(vocab_size=64, hidden_size=64, chunk_size=8, bos_token_id=1, eos_token_id=2, pad_token_id=0)
heads = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
configs = {
    "mamba2": Mamba2Config(**small, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=1),
    "nemotron_h": NemotronHConfig(
        **small, **heads, layers_block_type=["mamba", "attention", "mlp"], head_dim=16, mamba_num_heads=8,
        mamba_head_dim=16, n_groups=1, ssm_state_size=16),
    "zamba2": Zamba2Config(
        **small, **{**heads, "num_key_value_heads": 4}, num_hidden_layers=2, layers_block_type=["mamba", "hybrid"],
        mamba_d_state=16, mamba_headdim=16, n_mamba_heads=8, adapter_rank=4, mamba_ngroups=1),
}
moved = {}
for name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().double()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
        row = torch.randint(3, 64, (1, 40))
        first, second = row.clone(), row.clone()
        second[0, -1] = 3 + (int(row[0, -1]) - 2) % 61  # another last token
        apart = [model(input_ids=x, use_cache=False).logits.log_softmax(-1)[0, :-1] for x in (first, second)]
    gap = (apart[0] - apart[1]).abs().amax(-1)
    moved[name] = bool(gap.max() > 1e-6)
    places = (gap > 1e-6).nonzero().flatten().tolist()
    where = f"{len(places)} of 39 positions, the first at {places[0]}" if places else "no position"
    print(f"{name}: another token at place 39 moves log-probs of {where}, by up to {float(gap.max()):.2g} nats")
raise SystemExit(moved != {"mamba2": False, "nemotron_h": True, "zamba2": True})
PYTHON
env/bin/python try.py
