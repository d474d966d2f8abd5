#!/usr/bin/env bash
# Natural guess: verl's reward for programs, which is a share of the tests, is 1 only for a program that passes all of them.
# What is so: if not all pass, the share is counted anew over the first ten tests. A program that fails at the eleventh and
# every later test has 10 of 10 and the full reward, as the right program does; one that fails only the first nine and passes
# the other 31 has 0.1.
# Why it matters: data sets of contests have the small cases first and the large ones, for which the task was set, last. A
# policy is paid in full for brute force and for tables of the examples, and no curve shows it.
# This is how verl calls it for apps, taco, codecontests and codeforces; the grader needs numpy and nothing else of verl, and
# is loaded alone, since verl imports Ray and torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check numpy==2.3.5 2>&1 | grep -v WARNING || true
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps verl==0.9.1 \
    2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(find_spec("verl").submodule_search_locations[0]) / "utils/reward_score"))
import prime_code

print("verl", version("verl"))
numbers = range(40)
tests = json.dumps({"inputs": [f"{n}\n" for n in numbers], "outputs": [f"{n * n}\n" for n in numbers]})
programs = {"passes all 40": "True", "fails from the 11th on": "n < 10", "fails the first nine": "n >= 9"}
seen = {}
for name, condition in programs.items():
    answer = f"```python\nn = int(input())\nprint(n * n if {condition} else -1)\n```"
    seen[name] = float(prime_code.compute_score(answer, tests, continuous=True)[0])
    print(f"a program that {name}: {seen[name]}")
sys.exit(list(seen.values()) != [1.0, 1.0, 0.1])
PY
