#!/usr/bin/env bash
# Natural guess: reasoning-gym's gsm_symbolic, whose answers are whole numbers, pays for that number.
# What is so: its scorer looks for the first digits of the reply, so "-20" earns 1.0 where 20 is right, and so do "It is not
# 20." and "20 or 1"; "1 or 20" earns nothing. So in every item tried.
# Why it matters: a policy is paid for a number and not for an answer, with the sign and the sentence around it free, and one
# that shows its work, whose first number is the question's, is never paid.
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
items = reasoning_gym.create_dataset("gsm_symbolic", size=60, seed=0)
replies = {"{}": 60, "-{}": 60, "It is not {}.": 60, "{} or 1": 60, "1 or {}": 0, "2 + 3 = 5, so {}": 0}
paid = {}
for reply in replies:
    paid[reply] = sum(
        items.score_answer(reply.format(item["answer"]), item) == 1.0 for item in items if item["answer"] not in "125"
    )
    print(f"{reply!r}: the full reward in {paid[reply]}")
sys.exit(paid != {reply: (n and paid["{}"]) for reply, n in replies.items()} or paid["{}"] < 50)
PY
