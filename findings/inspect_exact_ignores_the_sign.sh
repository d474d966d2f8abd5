#!/usr/bin/env bash
# Natural guess: Inspect's scorer exact() counts an answer that is the target, give or take case and spaces.
# What is so: punctuation is removed from numbers first, the minus sign with it, so 16 is right for -16 and -16 for 16, and
# 16% for 16; match() takes -16 for 16, 116 for 16 and 2^16 for 16, since it compares ends. match(numeric=True) keeps signs.
# Why it matters: on tasks with changes, temperatures or balances a policy is paid in full for the wrong direction, with the
# scorer whose name promises the least.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check inspect-ai==0.3.285
cd "$folder"
env/bin/python - <<'PY'
import asyncio
import sys
from importlib.metadata import version
from inspect_ai.model import ChatMessageUser, ModelOutput
from inspect_ai.scorer import Target, exact, match
from inspect_ai.solver import TaskState

async def value(scorer, answer, target):
    asked = [ChatMessageUser(content="What is the change?")]
    said = ModelOutput.from_content("mockllm/model", answer)
    state = TaskState(
        model="mockllm/model", sample_id=1, epoch=1, input="What is the change?", messages=asked, output=said
    )
    return (await scorer(state, Target(target))).value

pairs = [("16", "16"), ("-16", "16"), ("16", "-16"), ("16%", "16"), ("116", "16"), ("2^16", "16"), ("17", "16")]
expected = {"exact": "CCCCIII", "match": "CCCCCCI", "match, numeric": "CIIIIII"}
scorers = {"exact": exact(), "match": match(), "match, numeric": match(numeric=True)}
print("inspect-ai", version("inspect-ai"), "answer for target:", *(f"{a} for {t}," for a, t in pairs))
seen = {}
for name, scorer in scorers.items():
    seen[name] = "".join(asyncio.run(value(scorer, *pair)) for pair in pairs)
    print(f"{name}: {seen[name]}")
sys.exit(seen != expected)
PY
