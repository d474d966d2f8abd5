#!/usr/bin/env bash
# Natural guess: verl's graders of GSM8K and of DAPO's data take a right number at the end of a sentence, as the sentence
# around it does.
# What is so: the full stop belongs to the number that is read. "#### 72." earns 0 and "Answer: 72." earns -1 where 72 is
# right, as a wrong number does; so do "#### 72.00", "#### $72" and a box with spaces. "Answer: $72$." and "Answer: x = 72"
# earn the full reward.
# Why it matters: whether a rollout is paid depends on its last sign. Groups whose rollouts all have the right number differ
# in reward, and what the policy learns first is to leave the stop out; accuracies before and after are of punctuation too.
# The graders are files that need nothing else of verl, and are loaded alone, since verl imports Ray and torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps verl==0.9.1
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

graders = Path(find_spec("verl").submodule_search_locations[0]) / "utils/reward_score"

def grader(name):
    spec = spec_from_file_location(name, graders / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score

gsm8k, dapo = grader("gsm8k"), grader("math_dapo")
print("verl", version("verl"))
expected = {
    "#### 72": 1.0, "#### 72.": 0, "#### 72.00": 0, "#### $72": 0, "#### 71": 0,
    "Answer: 72": 1.0, "Answer: 72.": -1.0, "Answer: $72$.": 1.0, "Answer: x = 72": 1.0, "Answer: 71": -1.0,
    r"It is \boxed{72}.": 1.0, r"It is \boxed{ 72 }.": -1.0,
}
seen = {}
for text in expected:
    seen[text] = gsm8k(text, "72") if text.startswith("#") else dapo(text, "72")["score"]
    print(f"{text!r}: {seen[text]}")
sys.exit(seen != expected)
PY
