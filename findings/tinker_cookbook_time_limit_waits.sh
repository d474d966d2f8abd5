#!/usr/bin/env bash
# Natural guess: tinker-cookbook's `run_with_timeout_signal(grade, ..., timeout_seconds=1)` returns after one second.
# What is so: it returns when the function does, and says then that it timed out: it runs it in a pool of threads, whose
# `with` block waits for the thread. The answer is None, which its caller takes for "wrong". AReaL 1.0.4's
# `MathVerifyWorker.verify` is written in the same way.
# Why it matters: a slow comparison holds a rollout for as long as it likes, and its result, which is there by then, is
# thrown away: a right answer is trained as a wrong one.
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
import time
from importlib.metadata import files, version

path = next(f for f in files("tinker-cookbook") if f.name == "math_grading.py").locate()
limited = runpy.run_path(str(path))["run_with_timeout_signal"]


def slow() -> bool:
    time.sleep(4)
    return True


print("tinker-cookbook", version("tinker-cookbook"))
began = time.monotonic()
found = limited(slow, timeout_seconds=1)
seconds = time.monotonic() - began
print(f"limit 1 s, the function needs 4 s and returns True: {found} after {seconds:.1f} s")
sys.exit(not (found is None and seconds >= 4))
PY
