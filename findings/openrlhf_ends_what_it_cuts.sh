#!/usr/bin/env bash
# Natural guess: an answer that is longer than OpenRLHF's maximal length is cut in training, and has no end-of-turn token, since
# it does not end there.
# What is so: the last token of the row is replaced by that token, and its loss is not masked: "to avoid EOS_token truncation",
# as the source has it. An answer cut in the middle of a word is trained to end there.
# Why it matters: traces of agents and long thoughts are cut often, all at the same length and anywhere in a sentence. The model
# learns to stop in the middle, before the answer, and to be silent at that length; in RL it starts with rollouts that end
# without an answer and a reward of 0. Leave rows out that are too long.
# The data set class is OpenRLHF's, loaded alone; the template is TRL's copy of the published one.
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
    {"role": "user", "content": "Say the alphabet"},
    {"role": "assistant", "content": " ".join("abcdefghijklmnopqrstuvwxyz")},
]
seen = []
for length in (512, 42):
    row, learned = trained("qwen3_instruct_2507", talk, length, multiturn=False)
    seen.append(learned)
    print(f"max_length {length}\n  row: {row!r}\n  learned: {learned!r}")
cut = seen[1].removesuffix("<|im_end|>")
whole = talk[1]["content"]
sys.exit(not (seen[0] == whole + "<|im_end|>" and seen[1] != cut and whole.startswith(cut) and len(cut) < len(whole)))
PY
