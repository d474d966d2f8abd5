#!/usr/bin/env bash
# Natural guess: the chat template gets the schema of a tool as it was handed to verl's `function_tool`, or inferred by it.
# What is so: verl keeps of each parameter its type, description and enum, and drops all else without a word, also `items`,
# `properties` and `required` of an object, `default` and `minimum`. Of a list of orders the prompt says that it is an array;
# of a nested object neither the names of its fields nor that it has any.
# Why it matters: the policy is to fill in what it was not told, and pays for every guess with a failed call. It learns these
# names from rewards alone, and meets another prompt where it is served with the same tools. Name the fields in the description.
# The two modules are loaded alone, as verl imports Ray, torch and transformers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check pydantic==2.14.4 2>&1 | grep -v WARNING || true
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check --no-deps verl==0.9.1 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import json
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

[root] = find_spec("verl").submodule_search_locations
for name, path in (("verl", root), ("verl.tools", f"{root}/tools")):  # without what their __init__ imports
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [path]
utils = ModuleType("transformers.utils")  # which infers schemas; here they are given
utils.get_json_schema = None
sys.modules |= {"transformers": ModuleType("transformers"), utils.__name__: utils}
tools = import_module("verl.tools.function_tool")

order = {"type": "object", "required": ["what"], "properties": {"what": {"type": "string"}, "count": {"type": "integer"}}}
place = {"type": "object", "properties": {"city": {"type": "string"}, "street": {"type": "string"}}, "required": ["city"]}
given = {
    "orders": {"type": "array", "description": "What to buy.", "items": order, "minItems": 1},
    "to": {"description": "Where to.", **place},
    "grams": {"type": "integer", "description": "The weight.", "minimum": 1, "maximum": 9999, "default": 100},
    "size": {"type": "string", "enum": ["small", "large"]},
}
parameters = {"type": "object", "properties": given, "required": ["orders", "to"]}
schema = {"type": "function", "function": {"name": "send", "description": "Send things.", "parameters": parameters}}
tools.function_tool("send", schema=schema)(lambda **arguments: "sent")

# As verl's agent loop hands it to the chat template.
function = tools.get_function_tool("send").tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"]
print("verl", version("verl"))
seen = function["parameters"]["properties"]
for name in given:
    print(f"{name}\n  given: {json.dumps(given[name])}\n  in the prompt: {json.dumps(seen[name])}")
expected = {
    name: {key: value for key, value in values.items() if key in ("type", "description", "enum")}
    for name, values in given.items()
}
sys.exit(seen != expected or function["parameters"]["required"] != ["orders", "to"])
PY
