#!/usr/bin/env bash
# Natural guess: get_soft_overlong_punishment, DAPO's penalty for long answers, counts the tokens that the policy wrote.
# What is so: in a GRPOTrainer with tools it counts the tools' results and the template's words around them as well: the
# completion_ids that rewards get are the whole rollout after the prompt, and nothing in them tells the two apart.
# Why it matters: of two rollouts that write the same words, the one whose tool answers at length gets the full penalty.
# The policy learns to avoid tools with long answers, such as searches and files, and not to write less.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 trl==1.16.0 datasets==5.2.0 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
from pathlib import Path

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl.rewards import get_soft_overlong_punishment

PAGES = {"short": "Paris.", "long": "Paris. " * 60}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"page": "capital"}}\n</tool_call>'
LIMIT, CACHE = 400, 100
penalty = get_soft_overlong_punishment(LIMIT, CACHE)
seen = {}


def look_up(page: str) -> str:
    """A page.

    Args:
        page: Its name.
    """
    return PAGES[Scripted.page]


class Scripted(trl.GRPOTrainer):
    """The trainer, with a policy that writes the same words whatever the tool says."""

    page = ""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        asked = self.processing_class.decode(prompt_ids[0])
        said = "Paris" if "<tool_response>" in asked else CALL
        return [self.processing_class.encode(said + "<|im_end|>") for _ in prompt_ids], None


def reward(completion_ids, completions, **_):
    written = sum(
        len(tokenizer.encode(CALL if m.get("tool_calls") else m["content"])) + 1
        for m in completions[0] if m["role"] == "assistant"
    )
    values = penalty(completion_ids)
    seen[Scripted.page] = written, len(completion_ids[0]), values[0]
    return values


letters = sorted(pre_tokenizers.ByteLevel.alphabet())
bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>")
tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
shape = Qwen2Config(
    vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1,
)
settings = trl.GRPOConfig(
    output_dir="out", per_device_train_batch_size=2, num_generations=2, max_steps=1, max_completion_length=2000,
    report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
)
questions = Dataset.from_list([{"prompt": [{"role": "user", "content": "The capital of France?"}]}] * 2)
print(*(f"{name} {version(name)}" for name in ("trl", "transformers")), sep=", ")
for Scripted.page in PAGES:
    trainer = Scripted(
        model=Qwen2ForCausalLM(shape), reward_funcs=reward, args=settings, train_dataset=questions,
        processing_class=tokenizer, tools=[look_up],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    written, counted, value = seen[Scripted.page]
    print(f"a {Scripted.page} page: the policy wrote {written} tokens, {counted} are counted: penalty {value:g} of {LIMIT}")
(same, _, none), (again, counted, full) = seen.values()
sys.exit(not (same == again < LIMIT - CACHE and (none, full) == (0.0, -1.0) and counted > LIMIT))
PY
