#!/usr/bin/env bash
# Natural guess: a chat template and a list of messages decide the prompt; the version of transformers does not.
# What is so: since 5.21.1 transformers edits messages before the template sees them. It drops fields that are null, and
# copies `reasoning`, as vLLM names it, to `reasoning_content`, which templates read. The same conversation, rendered by
# the same template, has the earlier turn's thoughts in its prompt with 5.24.0 and has none with 5.10.4.
# Why it matters: a policy trained with one version and served or evaluated with the other reads prompts that it was not
# trained on, and nothing says so: neither the template nor the messages have changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --disable-pip-version-check jinja2==3.1.6
cat >"$folder/render.py" <<'PY'
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

template = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
messages = [
    {"role": "user", "content": "6 * 7?"},
    {"role": "assistant", "content": "42", "reasoning": "Six sevens.", "tool_calls": None},
    {"role": "user", "content": "Sure?"},
]
print(transformers.__version__, render_jinja_template([messages], chat_template=template)[0][0])
PY
for version in 5.10.4 5.24.0; do
    "$folder/env/bin/python" -m pip install -q --disable-pip-version-check "transformers==$version"
    "$folder/env/bin/python" "$folder/render.py" 2>/dev/null | tee -a "$folder/seen"
done
grep -qx '5.10.4 \[user\]6 \* 7?\[assistant\]42\[user\]Sure?' "$folder/seen"
grep -qx '5.24.0 \[user\]6 \* 7?\[assistant\]<think>Six sevens.</think>42\[user\]Sure?' "$folder/seen"
