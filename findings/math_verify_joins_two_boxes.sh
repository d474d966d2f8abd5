#!/usr/bin/env bash
# Natural guess: of a reply with two boxed answers math-verify compares the last one, as its readers of
# plain numbers do.
# What is so: boxes that stand close together become one set, {16, 17}, whatever the words between them
# say, so a reply that corrects itself and ends with the right box is wrong; with other words between
# them ("Step 1: ... Step 2: ...") the last box counts.
# Why it matters: a policy is punished for a correction that it got right, and learns not to correct, or
# to box once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check math-verify==0.9.0 sympy==1.14.0
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version
from math_verify import parse, verify
print("math-verify", version("math-verify"))
gold = parse("$16$")
replies = {
    r"The answer is \boxed{16}.": True,
    r"First I found \boxed{17}. That forgets the tax, so the final answer is \boxed{16}.": False,
    r"Step 1: \boxed{4}. Step 2: \boxed{16}": True,
    r"Step 1: 17. Step 2: 16": True,
}
found = {reply: verify(gold, parse(reply)) for reply in replies}
for reply, paid in found.items():
    print(paid, parse(reply), reply)
sys.exit(found != replies)
PY
