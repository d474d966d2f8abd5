#!/usr/bin/env bash
# Natural guess: ms-swift's agent template for Llama 3 reads every tool call that it has told the model to write, which is one
# JSON object with "name" and "parameters", and that it writes itself into training data.
# What is so: a call ends for it at the first two braces that close next to each other. If the last parameter is an object
# (with one more behind it all is well), the call lacks its last brace, is no JSON and is dropped, without an error or a line
# of the log. The answer then is one without calls; of two calls the other one alone is there. Llama 4 has the same reader.
# Why it matters: in rollouts no tool runs, the conversation ends, and the reward is that of an answer. A policy is punished for
# calls that it was trained on, and learns to put an object anywhere but at the end, or not to use such tools.
# The template is loaded alone, as its package imports torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps ms-swift==4.6.0
cd "$folder"
env/bin/python - <<'PY'
import json
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

[root] = find_spec("swift").submodule_search_locations
for name in ("swift", "swift.agent_template", "swift.infer_engine", "swift.template"):  # without their __init__
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [f"{root}{name.removeprefix('swift').replace('.', '/')}"]
sys.modules["swift.infer_engine"].Function = lambda name, arguments: (name, arguments)
# Used for answers in ReAct's format, of which there is none here.
sys.modules["swift.template"].split_str_parts_by = lambda text, keys: [{"key": "", "content": text}]
sys.modules["swift.template"].Prompt = list
template = import_module("swift.agent_template.llama").Llama3AgentTemplate()

print("ms-swift", version("ms-swift"))
cases = {
    "a text": [{"a": "x"}],
    "a text, then an object": [{"a": "x", "where": {"city": "Paris"}}],
    "an object, then a text": [{"where": {"city": "Paris"}, "a": "x"}],
    "a text, then a list of objects": [{"a": "x", "where": [{"city": "Paris"}]}],
    "two calls, one of them with an object": [{"where": {"city": "Paris"}}, {"a": "x"}],
}
expected = {name: calls for name, calls in cases.items()}
expected["a text, then an object"] = []
expected["two calls, one of them with an object"] = [{"a": "x"}]
seen = {}
for name, calls in cases.items():
    written = [{"content": json.dumps({"name": "look", "arguments": arguments})} for arguments in calls]
    text = template._format_tool_calls(written)
    seen[name] = [arguments for _, arguments in template.get_toolcall(text)]
    print(f"{name}: {text!r} is read as {seen[name] or 'no call'}")
sys.exit(seen != expected)
PY
