#!/usr/bin/env bash
# Natural guess: a column of JSON that `datasets` makes of mixed values gives back what went in.
# What is so: texts that are JSON scalars are stored without quotes, so "007" comes back as 7, "null" as
# None and "42" as a number; the text "hi" beside them stays a text.
# Why it matters: gold answers and chat contents change type only where they look like numbers, so a
# string comparison in a grader fails for exactly those rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check datasets==5.2.0
cd "$folder"
env/bin/python - <<'PY'
import sys, datasets
print("datasets", datasets.__version__)
given = ["hi", "007", "null", "42", [1]]
rows = datasets.Dataset.from_list([{"a": value} for value in given], on_mixed_types="use_json")
found = list(rows["a"])
print(given, "->", found)
sys.exit(found != ["hi", 7, None, 42, [1]])
PY
