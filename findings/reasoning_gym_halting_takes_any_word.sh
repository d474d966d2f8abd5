#!/usr/bin/env bash
# Natural guess: reasoning-gym's game_of_life_halting, which asks for True or False, pays for the right one of the two.
# What is so: it compares the truth values that Python gives the two texts, and every text but the empty one is true, "False"
# as well. So "False" earns 1.0 where True is right, "True" where False is, and "I do not know" in every item.
# Why it matters: the reward is 1.0 from the first step on, in every group, and teaches nothing; in a mixture of tasks the mean
# reward and the curve of this one look as if the policy had mastered it, and whoever drops solved tasks drops it as solved.
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
dataset = reasoning_gym.create_dataset("game_of_life_halting", size=40, seed=0)
seen = {}
for item in dataset:
    for reply in ("True", "False", "I do not know", ""):
        seen.setdefault((item["answer"], reply), set()).add(dataset.score_answer(reply, item))
for (right, reply), scores in sorted(seen.items()):
    print(f"right is {right!r}, the reply {reply!r}: {scores}")
rights = {right for right, _ in seen}
expected = {(right, reply): {1.0 if reply else 0.0} for right, reply in seen}
sys.exit(seen != expected or rights != {"True", "False"})
PY
