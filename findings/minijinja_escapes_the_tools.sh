#!/usr/bin/env bash
# Natural guess: a chat template renders the same prompt wherever it is rendered with a Jinja that understands it.
# What is so: `tojson`, with which templates print tools and arguments, writes an apostrophe as \u0027 and <, > and & as
# \u003c, \u003e and \u0026 in MiniJinja, the Jinja of programs written in Rust, and in Jinja2 itself, which sorts the keys as
# well; transformers replaces the filter by one that does neither.
# Why it matters: "the user's city", "a < b" or "<answer>" in the description of a tool are enough. A server that uses MiniJinja
# or Jinja2 as it comes shows the policy another prompt than the trainer computes its log-probs for, with each call of every
# conversation with tools; ids that are retokenized do not match, and no text of a message shows it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6 minijinja==3.1.0
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps trl==1.16.0
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jinja2
import minijinja
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

[root] = find_spec("trl").submodule_search_locations
template = Path(root, "chat_templates", "qwen2_5.jinja").read_text()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
print(*(f"{name} {version(name)}" for name in ("transformers", "jinja2", "minijinja", "trl")))

def rendered(about):
    limits = {"type": "number", "description": about, "maximum": 9}
    function = {"name": "find", "description": "Find.", "parameters": {"type": "object", "properties": {"n": limits}}}
    tools, talk = [{"type": "function", "function": function}], [{"role": "user", "content": "It's <b>."}]
    given = {"messages": talk, "tools": tools, "add_generation_prompt": True}
    blocks = {"trim_blocks": True, "lstrip_blocks": True}
    return (
        tokenizer.apply_chat_template(talk, tools=tools, chat_template=template, add_generation_prompt=True, tokenize=False),
        jinja2.Environment(**blocks).from_string(template).render(**given),
        minijinja.Environment(templates={"t": template}, **blocks).render_template("t", **given),
    )

def described(prompt):
    return next(line for line in prompt.splitlines() if '"find"' in line).partition('"n"')[2]

equal = []
for about in ("a number", "the user's number", "<answer> & more"):
    trainer, plain, rust = rendered(about)
    equal.append((trainer == plain, trainer == rust))
    print(f"{about!r}:\n  transformers {described(trainer)}\n  Jinja2       {described(plain)}"
          f"\n  MiniJinja    {described(rust)}")
sys.exit(equal != [(False, True), (False, False), (False, False)])
PY
