#!/usr/bin/env bash
# Natural guess: with `multiturn`, OpenRLHF's SFTDataset trains on the assistant's turns of a conversation, whatever the template.
# What is so: where an answer stands is counted in the conversation up to that answer, and applied to the whole conversation.
# Qwen 3's template leaves the thoughts of earlier turns out of the whole, and all behind them moves up: of the row with two
# questions the second user's message and its header are trained as if the model had written them. With Qwen 2.5's template,
# which leaves nothing out, the same conversation is masked as it should be. There is neither an error nor a warning.
# Why it matters: the longer the thoughts, the further the mask is off: users' words and tools' results are learned as if they
# were answers, in every row of several turns and in no row of one. The loss is low, since such text is easy to predict.
# The data set class is OpenRLHF's, loaded alone; the templates are TRL's copies of the published ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3 2>&1 | grep -v WARNING || true
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps openrlhf==0.11.2 trl==1.16.0
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import re
import runpy
import sys
from importlib.metadata import files, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

for name in ("openrlhf", "openrlhf.utils", "openrlhf.utils.utils"):  # of which one function is imported, for batches
    sys.modules[name] = ModuleType(name)
sys.modules["openrlhf.utils.utils"].zero_pad_sequences = None
[path] = [file for file in files("openrlhf") if str(file).endswith("openrlhf/datasets/sft_dataset.py")]
SFTDataset = runpy.run_path(str(path.locate()))["SFTDataset"]
[trl] = find_spec("trl").submodule_search_locations
PIECE = r"<[^<>]+>|\w+|\s|[^\w\s]"  # a token: a tag, a word, a space or a sign

class Rows(list):
    """As much of a data set as is read."""

    column_names = ()

    def map(self, function, **settings):
        return Rows(map(function, self))

    def filter(self, function):
        return Rows(filter(function, self))

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

def trained(name, talk, max_length, multiturn):
    template = Path(trl, "chat_templates", f"{name}.jinja").read_text()
    known = dict.fromkeys(["?", " ", "\n", "<think>", "</think>", "<|im_start|>", "<|im_end|>"])
    known |= dict.fromkeys(re.findall(PIECE, template + " ".join(message["content"] for message in talk)))
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(known)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", chat_template=template)
    fields = SimpleNamespace(input_key="messages", output_key=None, apply_chat_template=True, tokenizer_chat_template=None)
    strategy = SimpleNamespace(args=SimpleNamespace(data=fields))
    data = SFTDataset(Rows([{"messages": talk}]), tokenizer, max_length, strategy, multiturn=multiturn)
    ids, _, mask = data[0]
    row = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    # The mask of a token is about the token after it, which it predicts.
    return "".join(row), "".join(token for token, learned in zip(row[1:], mask[0].tolist()) if learned)

print("openrlhf", version("openrlhf"))
talk = [
    {"role": "user", "content": "Buy milk"},
    {"role": "assistant", "content": "<think>\nMilk is cheap\n</think>\n\nBought milk"},
    {"role": "user", "content": "Sell tea"},
    {"role": "assistant", "content": "<think>\nTea is dear\n</think>\n\nSold tea"},
]
first, second = (message["content"] + "<|im_end|>" for message in talk[1::2])
seen = {}
for name in ("qwen2_5", "qwen3"):
    row, seen[name] = trained(name, talk, 512, multiturn=True)
    print(f"{name}\n  row: {row!r}\n  learned: {seen[name]!r}")
expected = {
    "qwen2_5": first + "\n" + second,
    "qwen3": "Bought milk<|im_end|>\n<|im_start|>user\nSell tea<|im_end|>\n<|im_start|>assistant\n" + second,
}
sys.exit(seen != expected)
PY
