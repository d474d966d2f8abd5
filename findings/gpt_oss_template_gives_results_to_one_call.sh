#!/usr/bin/env bash
# Natural guess: a chat template that takes tool calls renders all calls of an answer, and each result below the name of its
# tool, or raises an error, as Llama 3.1's does for two calls.
# What is so: gpt-oss' template renders the first call, and every result until the next call below that one's name. Of an
# answer that asks for the weather and for a price the second call is gone, and the price stands as another answer of the tool
# for the weather. The ids of the calls, which say whose it is, are not read.
# Why it matters: traces of models that call several tools at once are what gpt-oss is warmed up and distilled on. It is trained
# to go on from a result of a call that nobody made, and never sees the tool that gave it; nothing says that calls are missing.
# The template is TRL's copy of the published one, rendered by Jinja2 with the settings and functions that transformers gives it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check jinja2==3.1.6 2>&1 | grep -v WARNING || true
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check --no-deps trl==1.16.0 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import json
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jinja2

jinja = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
jinja.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)


def raise_exception(words):
    raise jinja2.TemplateError(words)


jinja.globals.update(raise_exception=raise_exception, strftime_now=lambda _: "2026-01-02")
[trl] = find_spec("trl").submodule_search_locations


def call(identifier, name, **arguments):
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


weather, price = call("c1", "weather", city="Paris"), call("c2", "price", of="tea")
rain, euros = ({"role": "tool", "tool_call_id": c, "content": text} for c, text in (("c1", "rain"), ("c2", "3 euros")))
question = {"role": "user", "content": "Tea in Paris?"}


def render(name, *answers):
    messages = [question]
    for calls, results in answers:
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    template = jinja.from_string(Path(trl, "chat_templates", f"{name}.jinja").read_text())
    try:
        text = template.render(messages=messages, tools=None, add_generation_prompt=False, bos_token="")
    except jinja2.TemplateError as error:
        return f"an error: {error}"
    return text.split(question["content"], 1)[1]


print("templates of trl", version("trl"), "rendered with jinja2", version("jinja2"))
seen = {
    "gptoss, two calls at once": render("gptoss", ([weather, price], [rain, euros])),
    "gptoss, one after the other": render("gptoss", ([weather], [rain]), ([price], [euros])),
    "llama3_1, two calls at once": render("llama3_1", ([weather, price], [rain, euros])),
}
for name, text in seen.items():
    print(f"{name}\n  {text}")
at_once, after, llama = seen.values()
calls = {text: re.findall(r"assistant to=functions\.(\w+)", text) for text in (at_once, after)}
results = {text: re.findall(r"start\|>functions\.(\w+) to=assistant.*?message\|>\"(.*?)\"", text) for text in (at_once, after)}
expected = (
    calls[at_once] == ["weather"] and results[at_once] == [("weather", "rain"), ("weather", "3 euros")]
    and calls[after] == ["weather", "price"] and results[after] == [("weather", "rain"), ("price", "3 euros")]
    and llama.startswith("an error")
)
sys.exit(not expected)
PY
