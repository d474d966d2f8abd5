#!/usr/bin/env bash
# Natural guess: accuracy_reward of TRL, given to a GRPOTrainer with tools, judges the answer with which a rollout ends.
# What is so: it reads the first message of the completion, which is what the model wrote before its first tool call.
# think_format_reward of the same package reads completion[0], too. The trainer says nothing: its
# completions with tools are lists of several messages, and the rewards' docstrings ask for "a list of one message".
# Why it matters: an agent that guesses first and then corrects itself by a tool gets nothing, and one that guesses right
# and then answers wrong gets all. The policy learns to answer before it looks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 trl==1.16.0 datasets==5.2.0 math-verify==0.9.0 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
from pathlib import Path

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl.rewards import accuracy_reward


def multiply(a: int, b: int) -> str:
    """The product.

    Args:
        a: A factor.
        b: The other factor.
    """
    return str(a * b)


CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
rewarded = []


class Scripted(trl.GRPOTrainer):
    """The trainer, with a policy that guesses, calls the tool and answers."""

    first, last = "", ""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        asked = self.processing_class.decode(prompt_ids[0])
        said = rf"\boxed{{{self.last}}}" if "<tool_response>" in asked else rf"\boxed{{{self.first}}}" + "\n" + CALL
        return [self.processing_class.encode(said + "<|im_end|>") for _ in prompt_ids], None


def reward(completions, solution, **rest):
    values = accuracy_reward(completions, solution, **rest)
    rewarded.append((len(completions[0]), completions[0][-1]["content"], values[0]))
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
    output_dir="out", per_device_train_batch_size=2, num_generations=2, max_steps=1, max_completion_length=800,
    report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
)
question = {"prompt": [{"role": "user", "content": "6 times 7?"}], "solution": r"\boxed{42}"}
print(*(f"{name} {version(name)}" for name in ("trl", "transformers", "math-verify")), sep=", ")
for first, last in ((41, 42), (42, 41)):
    trainer = Scripted(
        model=Qwen2ForCausalLM(shape), reward_funcs=reward, args=settings,
        train_dataset=Dataset.from_list([question] * 2), processing_class=tokenizer, tools=[multiply],
    )
    trainer.first, trainer.last = first, last
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    messages, final, value = rewarded[-1]
    print(f"guess {first}, then multiply(6, 7), then {final}: {messages} messages, reward {value:g}")
sys.exit([(n, value) for n, _, value in rewarded] != [(3, 0.0), (3, 1.0)])
PY
