#!/usr/bin/env bash
# Natural guess: `load_dataset` of JSON lines gives the values that json.loads gives.
# What is so: once one column of the file has mixed types, a small number in another plain column of
# floats is 0.0, and a text that is a date is a datetime with a time.
# Why it matters: tolerances and tiny targets become 0 and dates no longer equal the answers that an
# agent writes, only because of a column that nobody uses.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check datasets==5.2.0
cd "$folder"
env/bin/python - <<'PY'
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import datasets
print("datasets", datasets.__version__)
rows = [{"tiny": 1e-12, "day": "2026-01-02", "x": 1}, {"tiny": 1.0, "day": "2026-01-03", "x": [1]}]
open("t.jsonl", "w").write("".join(json.dumps(row) + "\n" for row in rows))
found = datasets.load_dataset("json", data_files="t.jsonl", split="train", cache_dir="cache")[0]
print(rows[0], "->", found)
sys.exit(not (found["tiny"] == 0.0 and hasattr(found["day"], "hour")))
PY
