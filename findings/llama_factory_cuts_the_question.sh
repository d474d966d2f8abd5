#!/usr/bin/env bash
# Natural guess: a row that is longer than LLaMA-Factory's cutoff_len loses its end, or its beginning, as elsewhere; if a
# prompt has to be shortened before its answer, what stands right before the answer stays.
# What is so: prompt and answer are cut separately, each at its end, and joined again. A document with the question below it
# loses the question and the assistant's header, and the answer follows on from the middle of the document. If both are
# long, both are cut in proportion, also a prompt that would have fitted. Of a conversation whose first turn is too long
# only the first answer is left. Nothing is logged.
# Why it matters: the model is trained to answer questions that it was not shown, in the middle of a user's turn, with labels
# that look right; pairs for DPO are cut by the same function. Long documents are where it happens, so short ones look fine.
# The data processor is LLaMA-Factory's, loaded alone as its package imports torch; template and tokenizer are plain lists of
# words, to be readable.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check transformers==5.6.0
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps llamafactory==0.9.5
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

[root] = find_spec("llamafactory").submodule_search_locations
for name in ("llamafactory", "llamafactory.data", "llamafactory.data.processor"):
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = ["/".join([root, *name.split(".")[1:]])]
for name in ("peft", "peft.utils"):  # of which two names of files are imported
    sys.modules[name] = ModuleType(name)
sys.modules["peft.utils"].SAFETENSORS_WEIGHTS_NAME = sys.modules["peft.utils"].WEIGHTS_NAME = "unused"

from llamafactory.data.processor.supervised import SupervisedDatasetProcessor

def encode_multiturn(tokenizer, messages, *rest):
    words = [message["content"].split() for message in messages]
    asked = [["<user>", *text, "<assistant>"] for text in words[::2]]
    return list(zip(asked, [[*text, "<end>"] for text in words[1::2]]))

plugin = SimpleNamespace(process_messages=lambda messages, *rest: messages,
                         process_token_ids=lambda ids, labels, *rest: (ids, labels))
template = SimpleNamespace(mm_plugin=plugin, encode_multiturn=encode_multiturn, efficient_eos=False,
                           preserve_thinking=False)

def trained(cutoff, *turns):
    settings = SimpleNamespace(cutoff_len=cutoff, mask_history=False, train_on_prompt=False)
    processor = SupervisedDatasetProcessor(template=template, tokenizer=None, processor=None, data_args=settings)
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    ids, labels = processor._encode_data_example(messages[:-1], messages[-1:], None, None, [], [], [])
    return " ".join(ids), " ".join(label for label in labels if label != -100)

document = " ".join(f"d{number}" for number in range(20))
print("llamafactory", version("llamafactory"))
cases = [
    (64, document + " Who won?", "Ada won."),
    (12, document + " Who won?", "Ada won."),
    (12, "Who won? Say why.", document),
    (12, document, "Read.", "Who won?", "Ada won."),
]
expected = [
    (f"<user> {document} Who won? <assistant> Ada won. <end>", "Ada won. <end>"),
    ("<user> d0 d1 d2 d3 d4 d5 d6 d7 Ada won. <end>", "Ada won. <end>"),
    ("<user> Who won? d0 d1 d2 d3 d4 d5 d6 d7 d8", "d0 d1 d2 d3 d4 d5 d6 d7 d8"),
    ("<user> d0 d1 d2 d3 d4 d5 d6 d7 d8 Read. <end>", "Read. <end>"),
]
seen = [trained(*case) for case in cases]
for (cutoff, *turns), (row, learned) in zip(cases, seen):
    print(f"cutoff_len {cutoff}, {turns}\n  row: {row}\n  learned: {learned}")
sys.exit(seen != expected)
PY
