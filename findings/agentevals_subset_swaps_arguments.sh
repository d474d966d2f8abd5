#!/usr/bin/env bash
# Natural guess: tool_args_match_mode="superset" of agentevals accepts calls that have the reference's arguments and
# perhaps more, whichever trajectory_match_mode compares the list of calls.
# What is so: it does with "strict" and "superset". With trajectory_match_mode="subset" the two calls are swapped before
# their arguments are compared: book(city) passes where book(city, seats) is the reference, and with one argument more it
# fails; "subset" is inverted in the same way. With "unordered" both modes compare exactly.
# Why it matters: with such a match as reward a policy is paid for leaving out what it was asked for and gets nothing for
# a call that has it all; a group of exact calls, as in most tests, shows no difference.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check agentevals==0.0.9 openevals==0.2.2 langchain-core==1.8.3 \
    2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import json
import sys
from importlib.metadata import version

from agentevals.trajectory.match import create_trajectory_match_evaluator


def booking(**arguments: object) -> list[dict[str, object]]:
    function = {"name": "book", "arguments": json.dumps(arguments)}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return [{"role": "user", "content": "Two seats."}, {"role": "assistant", "content": "", "tool_calls": calls}]


print("agentevals", version("agentevals"))
reference = booking(city="Rome", seats=2)
tried = {"fewer": booking(city="Rome"), "same": reference, "more": booking(city="Rome", seats=2, late=True)}
seen = {}
for arguments in ("superset", "subset"):
    for calls in ("strict", "superset", "unordered", "subset"):
        judge = create_trajectory_match_evaluator(trajectory_match_mode=calls, tool_args_match_mode=arguments)
        passed = [name for name, made in tried.items() if judge(outputs=made, reference_outputs=reference)["score"]]
        print(f"arguments {arguments}, calls {calls}: passes with {' and '.join(passed)}")
        seen[arguments, calls] = passed
more, fewer, same = ["same", "more"], ["fewer", "same"], ["same"]
expected = {
    ("superset", "strict"): more, ("superset", "superset"): more,
    ("superset", "unordered"): same, ("superset", "subset"): fewer,
    ("subset", "strict"): fewer, ("subset", "superset"): fewer,
    ("subset", "unordered"): same, ("subset", "subset"): more,
}
sys.exit(seen != expected)
PY
