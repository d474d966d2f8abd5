#!/usr/bin/env bash
# Natural guess: the SQL tool of SkyRL's text-to-SQL environment shows the agent what its query returned.
# What is so: the rows go through a frozenset and lose their columns' names: ORDER BY has no effect, equal rows are shown
# once, and the order of texts is another in each process, as Python draws the seed of its hashes anew.
# Why it matters: an agent that sorts, counts or reads "the first row" is told something else than the database said, and
# the same action in the same state gives another observation in another worker, so that no seed repeats a rollout.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check skyrl-gym==0.4.0 func_timeout==4.3.5 omegaconf==2.3.0 \
    pandas==2.3.3 requests==2.32.5
cd "$folder"
mkdir shop
cat > ask.py <<'PY'
import sqlite3
from pathlib import Path

from skyrl_gym.tools import SQLCodeExecutorToolGroup

file = Path("shop/shop.sqlite")
if not file.exists():
    with sqlite3.connect(file) as db:
        db.execute("create table sale (item text, price integer)")
        rows = [("pear", 1), ("fig", 2), ("plum", 3), ("kiwi", 4), ("lime", 5), ("date", 6), ("fig", 2)]
        db.executemany("insert into sale values (?, ?)", rows)
tool = SQLCodeExecutorToolGroup(db_file_path=".")
print(tool.sql("shop", "select item, price from sale order by price", 3))
PY
for seed in 1 2 3; do PYTHONHASHSEED=$seed env/bin/python ask.py > "seen-$seed"; done
env/bin/python - <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

print("skyrl-gym", version("skyrl-gym"))
seen = [Path(f"seen-{seed}").read_text() for seed in (1, 2, 3)]
print(*seen, sep="")
texts = set(seen)
sys.exit(not (len(texts) > 1 and all(text.count("fig") == 1 and "price" not in text for text in texts)))
PY
