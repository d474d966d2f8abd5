#!/usr/bin/env bash
# Natural guess: math-verify compares numbers in scientific notation as numbers, give or take a relative rounding.
# What is so: their difference is evaluated, and where it is below about 10^-16 it is 0: any two numbers of that size are
# equal, also with another sign. 1.60*10^{-19} is right for 6.63*10^{-34}. Written as decimals, numbers below half a
# millionth are (0.0000001 and 0.0000004). Large numbers are compared to the last digit: 6.630000000001*10^{34} is wrong for
# 6.63*10^{34}.
# Why it matters: constants, masses and cross sections of physics and chemistry pay any tiny number, with the wrong exponent
# or sign, in full. A policy learns that a small number is enough, on exactly the tasks that look solved.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check \
    math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2 sympy==1.14.0 \
    2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version

from math_verify import parse, verify

print("math-verify", version("math-verify"))
expected = {
    (r"6.63\times 10^{-34}", r"1.60\times 10^{-19}"): True,
    (r"1.60\times 10^{-19}", r"-1.60\times 10^{-19}"): True,
    (r"2\times 10^{-19}", r"3\times 10^{-25}"): True,
    ("0.0000004", "0.0000001"): True,
    (r"1.60\times 10^{-5}", r"1.61\times 10^{-5}"): False,
    (r"6.63\times 10^{34}", r"6.630000000001\times 10^{34}"): False,
}
seen = {}
for right, answer in expected:
    seen[right, answer] = verify(parse(f"${right}$"), parse(f"The answer is ${answer}$."))
    print(f"{answer} where {right} is right: {'right' if seen[right, answer] else 'wrong'}")
sys.exit(seen != expected)
PY
