#!/usr/bin/env bash
# Natural guess: a solver or tool of Inspect that raises TimeoutError makes an errored sample.
# What is so: any other exception does; after a TimeoutError the sample is scored as it stands, without
# an error or a limit in its record: only a line of the log says so.
# Why it matters: a sandbox or a service that is slow for a minute turns into zeros (or, here, a full
# score) that nobody can tell from judged ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check inspect-ai==0.3.285
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import solver

@scorer(metrics=[accuracy()])
def constant():
    async def score(state, target):
        return Score(value=1.0)
    return score

@solver
def slow(error):
    async def solve(state, generate):
        raise error("the service did not answer")
    return solve

print("inspect-ai", version("inspect-ai"))
found = {}
for error in (RuntimeError, TimeoutError):
    task = Task(dataset=[Sample(input="x", target="x")], solver=slow(error), scorer=constant())
    [log] = eval(task, model="mockllm/model", display="none", fail_on_error=False, log_dir="logs")
    sample = log.samples[0]
    found[error.__name__] = (bool(sample.error), sample.limit, sample.scores and sample.scores["constant"].value)
print(found)
sys.exit(found != {"RuntimeError": (True, None, {}), "TimeoutError": (False, None, 1.0)})
PY
