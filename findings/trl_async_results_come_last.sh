#!/usr/bin/env bash
# Natural guess: GRPOTrainer gives the results of an answer's tool calls to the model in the order of the calls.
# What is so: the results of tools that are coroutines come after those of all others. If the model calls weather(...),
# which is one, and then price(...), it reads the price first. TRL's messages have no ids of calls, and Qwen's templates,
# as TRL ships them, leave out the name of the tool, so that nothing tells which result is whose.
# Why it matters: the policy is trained to read the second call's result as the first's. It is right in training if it
# learns to swap them, and wrong wherever it is served, as clients answer in order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 trl==1.16.0 datasets==5.2.0 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import re
import sys
from importlib.metadata import version
from pathlib import Path

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM


def weather(city: str) -> str:
    """The weather.

    Args:
        city: Name of a city.
    """
    return f"dry in {city}"


async def later(city: str) -> str:
    """The weather.

    Args:
        city: Name of a city.
    """
    return weather(city)


def price(city: str) -> str:
    """The price.

    Args:
        city: Name of a city.
    """
    return f"cheap in {city}"


NAMES = ("weather", "price")
CALLS = "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {{"city": "Rome"}}}}\n</tool_call>' for n in NAMES)
asked = []


class Scripted(trl.GRPOTrainer):
    """The trainer, with a policy that calls both tools and then ends."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        asked.append(self.processing_class.decode(prompt_ids[0]))
        said = "done" if "dry in Rome" in asked[-1] else CALLS
        return [self.processing_class.encode(said + "<|im_end|>") for _ in prompt_ids], None


def reward(completions, **_):
    return [1.0 for _ in completions]


later.__name__ = "weather"
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
    output_dir="out", per_device_train_batch_size=2, num_generations=2, max_steps=1, max_completion_length=800,
    report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
)
questions = Dataset.from_list([{"prompt": [{"role": "user", "content": "Rome?"}]}] * 2)
print(*(f"{name} {version(name)}" for name in ("trl", "transformers")), sep=", ")
seen = {}
for kind, tool in (("a function", weather), ("a coroutine", later)):
    trainer = Scripted(
        model=Qwen2ForCausalLM(shape), reward_funcs=reward, args=settings, train_dataset=questions,
        processing_class=tokenizer, tools=[tool, price],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seen[kind] = re.findall(r"<tool_response>\n(.*)\n</tool_response>", asked[-1])
    print(f"weather is {kind}: calls", re.findall(r'"name": "(\w+)", "arguments": {"c', asked[-1]), "results", seen[kind])
dry, cheap = "dry in Rome", "cheap in Rome"
sys.exit(seen != {"a function": [dry, cheap], "a coroutine": [cheap, dry]})
PY
