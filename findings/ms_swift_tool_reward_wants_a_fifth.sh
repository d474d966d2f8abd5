#!/usr/bin/env bash
# Natural guess: ms-swift's reward for tool calls, "toolbench", which is True or False, pays for the right action with the
# right input.
# What is so: the right action with an input that is no JSON earns 1.0 if its ROUGE-L with the reference is 0.2: of three
# words the one in the middle is enough. "population of Germany" is right for "capital of France", and "delete all files"
# for "list all files". Between 0.1 and 0.2 it would count a tenth, which the last line makes a 0. Inputs that are
# JSON objects have to be equal, so that {"q": "population of Germany"} earns nothing.
# Why it matters: searches, shell commands and SQL are texts. A policy is paid in full for the tool's name and a preposition,
# groups have nothing to compare, and the reward says True.
# The reward is loaded alone, as its package imports torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check rouge==1.0.1
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps ms-swift==4.6.0
cd "$folder"
env/bin/python - <<'PY'
import json
import runpy
import sys
from importlib.metadata import files, version
from types import ModuleType

for name in ("swift", "swift.infer_engine"):  # of which the file imports one name, for a type
    sys.modules[name] = ModuleType(name)
sys.modules["swift.infer_engine"].InferRequest = dict
[path] = [file for file in files("ms-swift") if str(file) == "swift/rewards/orm.py"]
reward = runpy.run_path(str(path.locate()))["orms"]["toolbench"]()

def written(action, text):
    return f"Action: {action}\nAction Input: {text}"

print("ms-swift", version("ms-swift"), "rouge", version("rouge"))
right, wrong = "capital of France", "population of Germany"
cases = [
    (("search", right), ("search", right), 1.0),
    (("search", right), ("search", wrong), 1.0),
    (("shell", "list all files"), ("shell", "delete all files"), 1.0),
    (("sql", "SELECT name FROM staff WHERE team = 'sales'"), ("sql", "DELETE FROM staff"), 1.0),
    (("search", right), ("search", "weather tomorrow"), 0.0),
    (("search", right), ("look", right), 0.0),
    (("search", json.dumps({"q": right})), ("search", json.dumps({"q": wrong})), 0.0),
]
seen = []
for reference, sampled, _ in cases:
    seen += reward([written(*sampled)], [written(*reference)])
    print(f"{reference}, sampled {sampled}: {seen[-1]}")
sys.exit(seen != [value for *_, value in cases])
PY
