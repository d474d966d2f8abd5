#!/usr/bin/env bash
# Natural guess: AReaL's reward for Geometry3K, which calls math-verify, pays for an answer that equals the reference.
# What is so: before that, of both texts all but the last number is thrown away, unless there is something in square brackets,
# while AReaL's own prompt asks for \boxed{}. Where 2 \sqrt { 221 } is right, \boxed{7\sqrt{221}} and \boxed{221} earn 1.0, and
# \sqrt{884}, which is the same number, 0. For \frac { 3 } { 4 } a quarter is right and 0.75 is not.
# Why it matters: roots, fractions and multiples of pi are a good part of this data set's answers. A policy is paid for the
# last digits of the form, a rollout that simplifies is punished, and groups compare rollouts that are all wrong.
# The reward is loaded alone, as AReaL's package imports torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check math-verify==0.8.0 sympy==1.14.0
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps areal==1.0.4
cd "$folder"
env/bin/python - 2>/dev/null <<'PY'
import logging
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

[root] = find_spec("areal").submodule_search_locations
for name, path in (("areal", root), ("areal.utils", f"{root}/utils")):  # without what their __init__ imports
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [path]
sys.modules["areal.utils"].logging = logging
reward = import_module("areal.reward.geometry3k").geometry3k_reward_fn

print("areal", version("areal"), "math-verify", version("math-verify"))
expected = {
    r"2 \sqrt { 221 }": {
        r"The final answer is \boxed{2\sqrt{221}}": 1.0,
        r"The final answer is \boxed{7\sqrt{221}}": 1.0,
        r"The final answer is \boxed{221}": 1.0,
        r"The final answer is \boxed{\sqrt{884}}": 0.0,
    },
    r"\frac { 3 } { 4 }": {
        r"The final answer is \boxed{\frac{1}{4}}": 1.0,
        r"The final answer is \boxed{0.75}": 0.0,
    },
    r"36 + 9 \pi": {r"The final answer is \boxed{9\pi}": 1.0, r"The final answer is \boxed{36+9\pi}": 1.0},
}
seen = {}
for right, texts in expected.items():
    seen[right] = {}
    for text in texts:
        seen[right][text] = reward("", text, [], [], right)
        print(f"{right} is right, {text!r}: {seen[right][text]}")
sys.exit(seen != expected)
PY
