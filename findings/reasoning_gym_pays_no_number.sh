#!/usr/bin/env bash
# Natural guess: a reply that is no number earns nothing in reasoning-gym's complex_arithmetic.
# What is so: the reply "nan" earns 1.0 in every item: the reward is the smaller of 1 and a function of the distance, and the
# smaller of 1.0 and a distance that is not a number is, in Python, 1.0. "inf" and words earn 0.
# Why it matters: one word solves the data set; what a policy finds among samples of a broken format (models write "nan" when
# arithmetic goes wrong) becomes its only answer, at full reward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check reasoning-gym==0.1.25
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version
import reasoning_gym

print("reasoning-gym", version("reasoning-gym"))
items = list(dataset := reasoning_gym.create_dataset("complex_arithmetic", size=50, seed=0))
seen = {reply: {dataset.score_answer(reply, item) for item in items} for reply in ("nan", "inf", "unknown")}
seen["the answer"] = {dataset.score_answer(item["answer"], item) for item in items}
for reply, rewards in seen.items():
    print(f"{reply!r}: {sorted(rewards)} over {len(items)} items")
sys.exit(seen != {"nan": {1.0}, "inf": {0.0}, "unknown": {0.0}, "the answer": {1.0}})
PY
