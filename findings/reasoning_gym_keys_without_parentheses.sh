#!/usr/bin/env bash
# Natural guess: the answer of an item of reasoning-gym's basic_arithmetic is the value of its expression.
# What is so: with allow_parentheses=False, the setting for easy sums, most items with a division have another answer: the
# expression is built piece by piece with whole quotients, and the pieces are joined without the parentheses that this
# would need. "4 / 1 / 7" has the answer 8. With parentheses (the default) 2 of 200 are wrong.
# Why it matters: the curriculum's easy end teaches wrong arithmetic, a policy that calculates right is paid for 40 % of these items, and
# the reward of right answers is as low as that of wrong ones, in groups that look informative.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check reasoning-gym==0.1.25
cd "$folder"
env/bin/python - <<'PY'
import sys
from fractions import Fraction
from importlib.metadata import version
import re
import reasoning_gym

def value(expression):
    """The exact value; None where it divides by zero."""
    exact = re.sub(r"\d+", lambda number: f"Fraction({number[0]})", expression)
    try:
        return eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        return None

print("reasoning-gym", version("reasoning-gym"))
wrong = {}
for parentheses in (False, True):
    items = reasoning_gym.create_dataset(
        "basic_arithmetic", size=200, seed=0, min_terms=3, max_terms=4, allow_parentheses=parentheses
    )
    other = [
        (item["metadata"]["expression"], item["answer"])
        for item in items
        if value(item["metadata"]["expression"]) != Fraction(item["answer"])
    ]
    wrong[parentheses] = len(other)
    print(f"allow_parentheses={parentheses}: {len(other)} of 200 answers are not the expression's value, such as")
    for expression, answer in other[:3]:
        print(f"  {expression} = {answer}")
sys.exit(not (wrong[False] > 80 and wrong[True] < 10))
PY
