#!/usr/bin/env bash
# Natural guess: TRL's think_format_reward pays 1.0 for a completion of a thinking model that closes its thought and answers.
# What is so: it wants the completion to begin with <think>. The templates of most thinking models (TRL's own copies for
# DeepSeek R1, Qwen 3.5 to 3.8 and Nemotron 3) write <think> at the end of the prompt, so that a completion begins inside of
# the thought: the right format earns 0.0, and only a completion that opens the thought a second time earns 1.0.
# Why it matters: all rollouts of a group have 0.0 and nothing is learned, which looks like a model that cannot find the
# format; or one rollout repeats the tag by chance, has the only reward of its group, and the policy learns to break its format.
# TRL is installed without torch, which this function does not use.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps trl==1.16.0
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from trl.rewards import think_format_reward

[root] = find_spec("trl").submodule_search_locations
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
question = [{"role": "user", "content": "How much is 17 + 25?"}]
sampled = "Seven and five are twelve, carry one.\n</think>\n\n42"
print("trl", version("trl"))
opened = []
for name in ("deepseek_r1_distill", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_super", "qwen3"):
    template = environment.from_string(Path(root, "chat_templates", f"{name}.jinja").read_text())
    prompt = template.render(messages=question, add_generation_prompt=True, bos_token="", eos_token="")
    opened.append(prompt.endswith("<think>\n"))
    print(f"{name}: the prompt ends with {prompt[-22:]!r}")
texts = [sampled, "<think>\n" + sampled, "42"]
rewards = think_format_reward([[{"role": "assistant", "content": text}] for text in texts])
for text, reward in zip(texts, rewards):
    print(f"after <think>, {text!r}: {reward}")
sys.exit((opened, rewards) != ([True] * 5 + [False], [0.0, 1.0, 0.0]))
PY
