#!/usr/bin/env bash
# Natural guess: `import transformers` gives one module for the life of a process, so a name that a library replaces in
# it (`transformers.AutoTokenizer = Faster`, as trainers do to speed up or to trace) stays replaced.
# What is so: importing any processor executes transformers' `__init__` a second time (`transformers.processing_utils`),
# which puts a new module into `sys.modules`. Who imported it before holds the old one; the replaced name is the original
# again for all later imports. Seen with 5.10.4 and 5.24.0, without an error or a warning.
# Why it matters: a patched tokenizer, model class or version check is in force until the first image-text policy or
# processor is loaded, and then silently is not; which one a module of a training run gets depends on the import order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat >"$folder/patched.py" <<'PY'
import sys

import transformers


class Faster:
    pass


held = transformers
held.AutoTokenizer = Faster
from transformers import AutoTokenizer as before  # noqa: E402
from transformers import AutoProcessor as _  # noqa: E402, F401
from transformers import AutoTokenizer as after  # noqa: E402

print(
    transformers.__version__,
    f"before: {before.__name__}, after AutoProcessor: {after.__name__},",
    f"one module: {sys.modules['transformers'] is held}",
)
PY
for version in 5.10.4 5.24.0; do
    "$folder/env/bin/python" -m pip install -q --disable-pip-version-check "transformers==$version"
    "$folder/env/bin/python" "$folder/patched.py" 2>/dev/null | tee -a "$folder/seen"
done
[ "$(grep -c 'before: Faster, after AutoProcessor: AutoTokenizer, one module: False$' "$folder/seen")" = 2 ]
