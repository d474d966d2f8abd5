#!/usr/bin/env bash
# Natural guess: `truncation=True, max_length=8` in a call of a tokenizer holds for that call, and save_pretrained writes the
# tokenizer that was loaded.
# What is so: the call leaves both in the tokenizer of Rust below, padding too. transformers sets them anew in every call and so
# never shows it; `backend_tokenizer.encode` cuts at 8, and save_pretrained writes `truncation` and `padding` into
# tokenizer.json. Who reads that file with the library `tokenizers`, as servers written in Rust and tools without
# transformers do, gets prompts of 8 tokens, padded if they are shorter; AutoTokenizer reads the same folder and cuts nothing.
# Why it matters: training with a maximal length and then saving is what every fine-tuning script does. The checkpoint is right
# wherever it is tested with transformers, and elsewhere answers to the first 512 tokens of each prompt, without an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import json
import sys
from importlib.metadata import version

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(100)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
prompt = " ".join(f"w{n}" for n in range(100))
print("transformers", version("transformers"), "tokenizers", version("tokenizers"))

def saved(name):
    tokenizer.save_pretrained(name)
    settings = json.loads(open(f"{name}/tokenizer.json").read())
    own, theirs = Tokenizer.from_file(f"{name}/tokenizer.json"), AutoTokenizer.from_pretrained(name)
    lengths = [len(own.encode(text).ids) for text in (prompt, "w1")]
    lengths += [len(theirs(text).input_ids) for text in (prompt, "w1")]
    print(f"{name}: tokenizers {lengths[:2]}, transformers {lengths[2:]} tokens for 100 words and for one;",
          "truncation:", settings["truncation"])
    return lengths

before = saved("as_loaded")
tokenizer([prompt, "w1"], truncation=True, max_length=8, padding="max_length")
backend = len(tokenizer.backend_tokenizer.encode(prompt).ids)
print("backend_tokenizer after a call that truncates:", backend)
tokenizer([prompt, "w1"], truncation=True, max_length=8, padding="max_length")
after = saved("after_training")
sys.exit((before, backend, after) != ([100, 1, 100, 1], 8, [8, 8, 100, 1]))
PY
