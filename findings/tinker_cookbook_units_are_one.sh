#!/usr/bin/env bash
# Natural guess: tinker-cookbook's grader of mathematics ignores a unit that is missing, not one that is wrong.
# What is so: the names of units are removed from both sides before they are compared. "3 weeks" is right for 3 days,
# "5 months" for 5 minutes, "1 mile" for 1 inch, "2 feet" for "2 feet^2"; and names are removed within words: "Sun" is
# right for Sunday.
# Why it matters: a policy that never learns to convert is paid as one that does, and a label with a unit does not say so.
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
asked = [("3 days", "3 weeks"), ("5 minutes", "5 months"), ("1 inch", "1 mile"), ("2 feet^2", "2 feet"),
         ("Sunday", "Sun"), ("3 days", "4 days")]
seen = [grade(given, right) for right, given in asked]
for (right, given), verdict in zip(asked, seen, strict=True):
    print(f"right is {right!r}, given {given!r}: {verdict}")
sys.exit(seen != [True, True, True, True, True, False])
PY
