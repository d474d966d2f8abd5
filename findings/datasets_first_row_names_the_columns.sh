#!/usr/bin/env bash
# Natural guess: a field that only some rows have is a column of `datasets` that is None elsewhere, as it is inside messages,
# where tool_calls of one message are None in the others, and as a file of the same rows gives it.
# What is so: Dataset.from_list, Dataset.from_generator and map take the names of the columns from the first row, and what
# only later rows have is gone, without an error or a warning. If the first row has the field and a later one lacks it,
# from_list fills in None and the other two raise KeyError.
# Why it matters: tools, answers or images that only some tasks have vanish if the first task has none; after a shuffle they
# are there again. A policy is trained without its tools, or every row counts as one without a gold answer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check datasets==5.2.0 2>&1 | grep -v WARNING || true
cd "$folder"
export HF_HOME="$folder/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1
env/bin/python - <<'PY' 2>/dev/null
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

call = {"role": "assistant", "content": "", "tool_calls": ["search"]}
plain = {"messages": [{"role": "user", "content": "2 + 2?"}]}
armed = {"messages": [{"role": "user", "content": "Who won?"}, call], "tools": ["search"]}


def label(row: dict, number: int, rows: list[dict]) -> dict:
    return {"tools": rows[number]["tools"]} if "tools" in rows[number] else {}


def columns(rows: list[dict], folder: str) -> dict[str, str]:
    file = Path(f"{folder}.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare = Dataset.from_list([{"messages": row["messages"]} for row in rows])
    ways = {
        "from_list": lambda: Dataset.from_list(rows),
        "from_generator": lambda: Dataset.from_generator(lambda: iter(rows), cache_dir=folder),
        "map": lambda: bare.map(label, with_indices=True, fn_kwargs={"rows": rows}, load_from_cache_file=False),
        "a file": lambda: load_dataset("json", data_files=str(file), split="train", cache_dir=f"{folder}-file"),
    }
    seen = {}
    for name, make in ways.items():
        try:
            data = make()
            seen[name] = " and ".join(data.column_names)
            assert data[rows.index(armed)]["messages"][1]["tool_calls"] == ["search"]
        except (KeyError, DatasetGenerationError) as error:
            seen[name] = type(error.__cause__ or error).__name__
    return seen


print("datasets", version("datasets"))
seen = {"without": columns([plain, armed], "without"), "with": columns([armed, plain], "with")}
for first, found in seen.items():
    for source, names in found.items():
        print(f"the first row is {first} tools, {source}: {names}")
few, both = "messages", "messages and tools"
without = {"from_list": few, "from_generator": few, "map": few, "a file": both}
beginning_with = {"from_list": both, "from_generator": "KeyError", "map": "KeyError", "a file": both}
sys.exit(seen != {"without": without, "with": beginning_with})
PY
