#!/usr/bin/env bash
# Natural guess: Axolotl's `chat_template.default` for DPO gives the chosen and the rejected answer as the template renders
# them after the prompt.
# What is so: it renders each answer below a user's turn "[[dummy_message]]", looks for the first place where the answer's text
# stands in the whole, and takes all from there on. "A" is found in Qwen's "created by Alibaba Cloud" and "a" in
# "dummy_message", so that the answer is the system prompt or the dummy. An answer without words, of calls only, is found at
# the very beginning, and its calls are left out. A text that the template trims, say one that ends with a space, is not
# found, and what is left is ">" (llama3) or nothing (gemma3).
# Why it matters: pairs of letters, of tool calls and of samples that end with white space are trained as something that
# nobody wrote. Losses and margins look as they should, as telling ">" from an answer is easy.
# The strategy is Axolotl's, with its templates, loaded without its packages' __init__, which import torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps axolotl==0.19.0
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import logging
import sys
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

[root] = find_spec("axolotl").submodule_search_locations
for name in ("axolotl", "axolotl.utils", "axolotl.utils.schemas", "axolotl.prompt_strategies", "axolotl.prompt_strategies.dpo"):
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = ["/".join([root, *name.split(".")[1:]])]
sys.modules["axolotl.utils.logging"] = ModuleType("logging")
sys.modules["axolotl.utils.logging"].get_logger = logging.getLogger

from axolotl.prompt_strategies.dpo.chat_template import default

class Settings(dict):
    __getattr__ = dict.get

words = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
print("axolotl", version("axolotl"))
dummy = "<|im_start|>user\n[[dummy_message]]<|im_end|>\n<|im_start|>assistant\n"
expected = {
    ("qwen_25", "Yes."): "Yes.<|im_end|>",
    ("qwen_25", "A"): f"Alibaba Cloud. You are a helpful assistant.<|im_end|>\n{dummy}A<|im_end|>",
    ("qwen_25", "B"): "B<|im_end|>",
    ("chatml", "a"): "art|>user\n[[dummy_message]]<|im_end|>\n<|im_start|>assistant\na<|im_end|>",
    ("chatml", ""): f"{dummy}<|im_end|>",
    ("llama3", "Yes."): "Yes.<|eot_id|>",
    ("llama3", "Yes. "): ">",
    ("gemma3", "Yes. "): "",
}
seen = {}
for name, answer in expected:
    transform, _ = default(Settings(datasets=[Settings()], chat_template=name))
    call = {"type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    said = {"role": "assistant", "content": answer, "tool_calls": [] if answer else [call]}
    row = {"messages": [{"role": "user", "content": "Is it so?"}], "chosen": said, "rejected": {"role": "assistant", "content": "?"}}
    seen[name, answer] = transform(row, tokenizer)["chosen"]
    print(f"{name}: {answer!r} is trained as {seen[name, answer]!r}")
sys.exit(seen != expected)
PY
