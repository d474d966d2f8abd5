#!/usr/bin/env bash
# Natural guess: reasoning-gym's puzzle24, which asks for 24 out of four given numbers, pays for expressions of these numbers.
# What is so: it asks for four numbers between the data set's smallest and largest, whichever they are, and for a value whose
# whole part is 24. 1*1*4*6 earns 1.0 in every item, and so does 5*5 - 1/2, which is 24.5.
# Why it matters: one text solves the data set. A policy finds it as soon as a rollout has forgotten a number of its question,
# which is the commonest mistake in this game, is paid in full for it, and has no reason to read the question from then on.
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
dataset = reasoning_gym.create_dataset("puzzle24", size=40, seed=0)
items = [item for item in dataset if sorted(item["metadata"]["numbers"]) != [1, 1, 4, 6]]
question = items[0]["question"].split(". You can use the")[0]
print(f"one of {len(items)} items: {question}")
expected = {"1*1*4*6": {1.0}, "5*5 - 1/2": {1.0}, "5*5 - 1*2": {0.01}, "4*6": {0.01}}
seen = {}
for reply in expected:
    seen[reply] = {dataset.score_answer(reply, item) for item in items}
    print(f"the reply {reply!r}: {seen[reply]}")
sys.exit(seen != expected)
PY
