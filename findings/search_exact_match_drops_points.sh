#!/usr/bin/env bash
# Natural guess: "exact match" of the search environments (Search-R1's function, here SkyRL's copy) holds for numbers, too.
# What is so: the answers are normalized as SQuAD's are: all punctuation is removed, then articles. "15" is right where
# 1.5 is asked, "3" for -3, "1030" for 10:30, "C" for C++, and "Vitamin" for Vitamin A.
# Why it matters: questions with numbers, versions or dates pay wrong answers in full, and an answer of which the sign or
# the point is wrong is never told from a right one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check skyrl-gym==0.4.0 func_timeout==4.3.5 omegaconf==2.3.0 \
    pandas==2.3.3 requests==2.32.5
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version

from skyrl_gym.envs.search.utils import compute_score

print("skyrl-gym", version("skyrl-gym"))
asked = [("1.5", "15"), ("-3", "3"), ("10:30", "1030"), ("C++", "C"), ("Vitamin A", "Vitamin"), ("1.5", "2.5")]
seen = [compute_score(f"<answer>{given}</answer>", {"target": right}) for right, given in asked]
for (right, given), reward in zip(asked, seen, strict=True):
    print(f"right is {right!r}, given {given!r}: {reward}")
sys.exit(seen != [1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
PY
