#!/usr/bin/env bash
# Natural guess: TRL's accuracy_reward pays 1 if the completion's answer is the solution.
# What is so: only LaTeX that stands where an answer is announced is read. With the solution "16" the completions "16",
# "The answer is 16." and "$16$" get 0, as wrong ones do, "$16$" also after "The answer is" gets 1; and the very text of a
# solution that is a time of day gets 0 in a box. Solutions that are a letter or a name give None for right and wrong ones.
# Why it matters: a prompt that does not ask for \boxed{} makes a task whose right answers are punished, and data with
# times or choices beside numbers train on zeros, or on nothing, without an error.
# TRL is installed without torch, which this function does not use.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check transformers==5.10.4 math-verify==0.9.0 sympy==1.14.0
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps trl==1.16.0
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
from trl.rewards import accuracy_reward
print("trl", version("trl"), "math-verify", version("math-verify"))
expected = {
    ("16", r"\boxed{16}"): 1.0,
    ("16", r"The answer is $16$."): 1.0,
    ("16", "16"): 0.0,
    ("16", "The answer is 16."): 0.0,
    ("16", "$16$"): 0.0,
    ("16", r"\boxed{17}"): 0.0,
    ("10:30", r"\boxed{10:30}"): 0.0,
    ("B", r"\boxed{B}"): None,
    ("Paris", r"\boxed{Rome}"): None,
}
seen = {}
for solution, text in expected:
    [seen[solution, text]] = accuracy_reward([[{"role": "assistant", "content": text}]], [solution])
    print(f"solution {solution!r}, completion {text!r}: {seen[solution, text]}")
sys.exit(seen != expected)
PY
