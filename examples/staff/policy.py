"""Builds the model that the run trains: a tiny Llama that uses the tools fluently, mostly wrongly.

No weights are downloaded. A tokenizer is trained on demonstrations of the agent at work, and a new
model imitates them. The demonstrator has bad habits: what is left to learn from rewards is which
queries to make, not how a query is written. The result is an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

os.environ.setdefault("OPENAI_API_KEY", "unused")  # agent.py makes its client when imported

from agent import PROMPT, query
from langchain_core.utils.function_calling import convert_to_openai_tool
from tasks import ASKED, Task, train

from agentrl.algorithms.sft import Conversation, imitate, rows_of

DEMONSTRATIONS = 2000
CORRECT = 0.3  # share of them that do what was asked
TOOLS = [convert_to_openai_tool(query)]
TEMPLATE = Path(__file__).with_name("template.jinja").read_text()


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    conversations = [demonstrate(dice.choice(train), dice) for _ in range(DEMONSTRATIONS)]
    texts, _ = render_jinja_template(conversations, tools=TOOLS, chat_template=TEMPLATE)
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer)
    rows = rows_of(tokenizer, conversations, TOOLS)
    imitate(model, rows, steps=450, batch=16, lr=6e-3, seed=seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def demonstrate(task: Task, dice: random.Random) -> Conversation:
    """The messages of one rollout, as LangChain sends them."""
    path = task["path"] if dice.random() < CORRECT else habit(task["path"], dice)
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": task["input"]}]
    found = task["person"]
    for column in path:
        sql = f"SELECT {column} FROM staff WHERE name = '{found}'"
        function = {"name": query.name, "arguments": json.dumps({"sql": sql})}
        call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        found = query.invoke({"sql": sql})
        messages += [call, {"role": "tool", "content": found}]
    return [*messages, {"role": "assistant", "content": found}]


def habit(path: list[str], dice: random.Random) -> list[str]:
    """What the demonstrator looks up instead: another column, or that of the wrong person."""
    if len(path) > 1 and dice.random() < 0.3:
        return path[1:]
    return [*path[:-1], ASKED[(ASKED.index(path[-1]) + 1) % len(ASKED)]]


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-pair encoding in which every word of the demonstrations is one token."""
    tokenizer = Tokenizer(models.BPE())
    # A word keeps the space after it, so a name is the same token in a question, in SQL and in a
    # result: the model copies it instead of learning how each name is spelt in each place.
    words = pre_tokenizers.Split(Regex(r"\w+ ?|[^\w]+"), "isolated")
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, spelling])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = re.compile(r"<[^<>]+>")  # tokens of their own
    tokenizer.train_from_iterator((part for text in texts for part in marks.split(text)), trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """0.1 M parameters. A wide initialisation halves the steps until it learns to copy.

    A Llama, because transformers gives every Qwen2 directory Qwen2's own way to split words.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
