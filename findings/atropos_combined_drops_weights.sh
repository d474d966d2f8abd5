#!/usr/bin/env bash
# Natural guess: Atropos' combined reward weighs its parts: accuracy with weight 1.0 and format with 0.1 pay 0.1 for a
# wrong answer in the right format, and a part with weight -1 is a penalty.
# What is so: a part's own weight is applied when it is called by itself, and the combination does not call it so: each
# part counts in full, whatever its weight, also 0 or a negative one. normalization="sum" still divides by the sum of the
# weights.
# Why it matters: a shaping reward that was meant as a hint weighs as much as the task, a penalty pays, and GRPO ranks a
# well formatted wrong answer beside a right one; the configuration that is logged says otherwise.
# Atropos is installed without what these rewards do not use (torch and servers).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check math-verify==0.9.0 sympy==1.14.0 2>&1 | grep -v WARNING || true
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps atroposlib==0.4.0 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import importlib.util  # the registry takes it for loaded
import logging
import sys
from importlib.metadata import version

from atroposlib.envs.reward_fns.registry import registry

logging.disable(logging.CRITICAL)
print("atroposlib", version("atroposlib"))
replies = {
    "right": r"The answer is \boxed{16}",
    "wrong, in the format": r"<think>A guess.</think><answer>\boxed{17}</answer>",
    "right, in the format": r"<think>8 + 8</think><answer>\boxed{16}</answer>",
}
seen = {}
for weight in (1.0, 0.1, 0.0, -1.0):
    form = {"type": "format", "weight": weight}
    parts = [{"type": "accuracy", "weight": 1.0}, form]
    both = registry.create({"type": "combined", "params": {"rewards": parts}})
    assert [part.weight for part in both.reward_functions] == [1.0, weight]
    alone = registry.create(form)(list(replies.values()))
    seen[weight] = both(list(replies.values()), solution="16")
    print(f"format with weight {weight}: alone {alone}, combined", dict(zip(replies, seen[weight], strict=True)))
    assert alone == [0.0, weight, weight]
sys.exit(any(rewards != [1.0, 1.0, 2.0] for rewards in seen.values()))
PY
