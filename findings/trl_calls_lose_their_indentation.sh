#!/usr/bin/env bash
# Natural guess: a tool of GRPOTrainer gets the text that the model wrote as its argument, with its line breaks and spaces.
# What is so: for Qwen 3.5 to 3.8, GLM 4.5 and Nemotron 3, whose calls have texts as they are between tags, TRL's response
# templates strip each text at both ends: a piece of code loses the indentation of its first line and its last line break, a
# separator " " is empty. Qwen 3's calls, which are JSON, keep all.
# Why it matters: tools that edit files look for a text with its indentation, find another line or none, and write code that
# does not run. The policy has no spelling that would arrive, and is punished for exact edits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6 2>&1 | grep -v WARNING || true
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps trl==1.16.0
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_template_utils import render_jinja_template

[root] = find_spec("trl").submodule_search_locations
sys.modules["trl"] = ModuleType("trl")
sys.modules["trl"].__path__ = [root]
sys.modules["trl.data_utils"] = ModuleType("trl.data_utils")  # of which one function is imported, for images
sys.modules["trl.data_utils"].prepare_multimodal_messages = None
trl = import_module("trl.chat_template_utils")

OLD = "        return total\n"
ARGUMENTS = {"old": OLD, "separator": " "}
text = {"type": "string"}
schema = {"type": "object", "properties": dict.fromkeys(ARGUMENTS, text)}
tool = {"type": "function", "function": {"name": "edit", "description": "Edits.", "parameters": schema}}
asked = {"role": "user", "content": "Fix it."}
call = {"type": "function", "function": {"name": "edit", "arguments": ARGUMENTS}}
answer = {"role": "assistant", "content": "", "tool_calls": [call]}


def arguments(template, parser):
    """What TRL reads of the answer that the chat template itself writes."""
    def render(messages, prompt):
        return render_jinja_template([messages], tools=[tool], chat_template=template, add_generation_prompt=prompt)[0][0]

    prompt = render([asked], True)
    written = render([asked, answer], False)
    common = prompt if written.startswith(prompt) else prompt[: prompt.rindex("assistant") + len("assistant")]
    assert written.startswith(common)
    message = parse_response(written.removeprefix(common), parser, prefix=common, tools=[tool])
    return message["tool_calls"][0]["function"]["arguments"]


print("trl", version("trl"), "transformers", version("transformers"))
stripped = {"old": OLD.strip(), "separator": ""}
expected = {"qwen3": ARGUMENTS, "qwen3_5": stripped, "glm4moe": stripped, "nemotron_3": stripped}
chat = {"qwen3_5": "qwen3_5_nothink", "nemotron_3": "nemotron_3_nano"}
seen = {}
for name in expected:
    template = getattr(trl, f"{chat.get(name, name)}_chat_template")
    seen[name] = arguments(template, getattr(trl, f"{name}_template"))
    print(f"{name}: written {ARGUMENTS}, read {seen[name]}")
sys.exit(seen != expected)
PY
