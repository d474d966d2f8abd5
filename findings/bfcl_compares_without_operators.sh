#!/usr/bin/env bash
# Natural guess: BFCL's checker of calls takes a text argument for right if it is one of the listed ones, give or take
# spaces and capitals.
# What is so: before it compares texts, also those that hold a formula, a path, a version or a number, it removes
# , . / - _ * ^ from both. Asked to integrate x**3, calls with "x*3", "x-3" or "x/3" are right; for the derivative of
# 3x**2 + 2x - 1 so is that of 3x*2 + 2*x/1. All four formulas with a power in the 400 tasks in Python may lose it.
# Why it matters: as a reward it pays for calls that compute something else, and a group in which one rollout wrote the
# power and another the product has no difference to learn from.
# The package is installed without its clients of models; their list, which the checker imports, is left empty.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps bfcl-eval==2026.3.23
cd "$folder"
env/bin/python - <<'PY'
import json
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

models = ModuleType("bfcl_eval.constants.model_config")
models.MODEL_CONFIG_MAPPING = {}
sys.modules[models.__name__] = models
package = Path(find_spec("bfcl_eval").submodule_search_locations[0])
from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import simple_function_checker

def rows(name):
    lines = (package / "data" / name).read_text().splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}

tasks = rows("BFCL_v4_simple_python.json")
answers = rows("possible_answer/BFCL_v4_simple_python.json")
print("bfcl-eval", version("bfcl-eval"))

def valid(task, **changed):
    (name, listed), = answers[task]["ground_truth"][0].items()
    first = {key: values[0] for key, values in listed.items() if values[0] != ""}
    called = {name.replace(".", "_"): first | changed}
    function = tasks[task]["function"][0] | {"name": name.replace(".", "_")}
    truth = {name.replace(".", "_"): listed}
    return simple_function_checker(function, called, truth, Language.PYTHON, "any")["valid"]

seen = {}
for task, formula in (
    ("simple_python_15", "x**3"), ("simple_python_15", "x*3"), ("simple_python_15", "x-3"),
    ("simple_python_15", "x/3"), ("simple_python_15", "x**4"), ("simple_python_15", "x+3"),
    ("simple_python_14", "3x*2 + 2*x/1"),
):
    seen[task, formula] = valid(task, function=formula)
    print(task, formula, seen[task, formula])

with_power, lost = 0, 0
for task, row in answers.items():
    (name, listed), = row["ground_truth"][0].items()
    for key, values in listed.items():
        if isinstance(values[0], str) and "**" in values[0]:
            with_power += 1
            lost += valid(task, **{key: values[0].replace("**", "*")})
print(f"powers written as products: {lost} of {with_power} arguments are still right")
sys.exit(list(seen.values()) != [True, True, True, True, False, False, True] or lost != with_power or not lost)
PY
