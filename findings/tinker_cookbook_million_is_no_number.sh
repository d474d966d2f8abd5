#!/usr/bin/env bash
# Natural guess: tinker-cookbook's grader, which reads "2 million" as 2*10^6, takes 2000000 for it.
# What is so: it does not, in either direction: of two answers of which one is written as an integer, the other must be
# the same text, and "2*10^6" is not one. Nor are 10^{3} and 1000, "2^3" and 8, "5!" and 120 equal, or "\sqrt{4}" and 2,
# while 3/2 and 1.5, which are no integers, are.
# Why it matters: right answers are punished where the label is a power, a factorial or a word for a number; the policy is
# taught the label's spelling.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
"$folder/env/bin/pip" install -q --disable-pip-version-check sympy==1.14.0 pylatexenc==2.10
cd "$folder"
# The module is loaded by its file: its package imports torch and a client of a service.
env/bin/python - <<'PY'
import runpy
import sys
from importlib.metadata import files, version

path = next(f for f in files("tinker-cookbook") if f.name == "math_grading.py").locate()
grade = runpy.run_path(str(path))["grade_answer"]
print("tinker-cookbook", version("tinker-cookbook"))
asked = [("2 million", "2000000"), ("2000000", "2 million"), ("10^{3}", "1000"), ("2^3", "8"), ("5!", "120"),
         (r"\sqrt{4}", "2"), ("3/2", "1.5")]
seen = [grade(given, right) for right, given in asked]
for (right, given), verdict in zip(asked, seen, strict=True):
    print(f"right is {right!r}, given {given!r}: {verdict}")
sys.exit(seen != [False] * 6 + [True])
PY
