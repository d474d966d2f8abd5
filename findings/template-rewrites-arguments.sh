#!/usr/bin/env bash
# Natural guess: where a chat template is prefix-preserving, as TRL calls Qwen 2.5's, the prompt of the next turn begins
# with the tool call that the model has written.
# What is so: it begins with another spelling of it. OpenAI's messages hold arguments as the model wrote them, in a
# string; templates want objects and serialise them again, so 1.50 becomes 1.5, 1e3 becomes 1000.0, white space is
# added, and a key that was written twice is there once. Passed as a string, the JSON is quoted a second time.
# Why it matters: log-probs of a retokenised conversation are of tokens that the policy never sampled, and the second
# call's prompt shares no cached prefix with the first one's answer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --disable-pip-version-check jinja2==3.1.6 transformers==5.24.0
"$folder/env/bin/python" -m pip install -q --disable-pip-version-check --no-deps trl==1.16.0
cat >"$folder/render.py" <<'PY'
import json
from importlib.metadata import distribution, version
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

print("transformers", version("transformers"), "trl", version("trl"))
file = Path(distribution("trl").locate_file("trl/chat_templates/qwen2_5.jinja"))
written = '{"price":1.50,"most":1e3,"city":"Oslo","city":"Bergen"}'


def shown(arguments):
    function = {"name": "order", "arguments": arguments}
    messages = [
        {"role": "user", "content": "Two, please."},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
    ]
    text = render_jinja_template([messages], chat_template=file.read_text())[0][0]
    return text.partition('"arguments": ')[2].partition("}\n</tool_call>")[0]


read, quoted = shown(json.loads(written)), shown(written)
print("written:  ", written, "\nas object:", read, "\nas string:", quoted)
assert read == '{"price": 1.5, "most": 1000.0, "city": "Bergen"}', read
assert quoted == json.dumps(written), quoted
PY
"$folder/env/bin/python" "$folder/render.py" 2>/dev/null
