"""Tiny models, trained on the spot: a tokenizer and a Llama that imitate given conversations.

Examples and benchmarks use them so that nothing is downloaded: 0.1 M parameters that write one
format fluently, as an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from agentrl.algorithms.model.sft import Conversation, imitate, rows_of
from agentrl.types import Json

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML, marking what the model writes."""
WORDS_TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message.role + '>' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content }}<end>{% endgeneration %}
{%- else -%}
{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}
"""
"""A mark for each turn, of whose it is, and one where the model stops."""


def imitator(
    directory: Path,
    conversations: Sequence[Conversation],
    *,
    seed: int,
    template: str = TEMPLATE,
    tools: list[dict[str, Json]] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    steps: int = 450,
    batch: int = 16,
    lr: float = 6e-3,
    heads: int = 4,
) -> float:
    """Write a model that imitates the assistant of the conversations, its tokenizer and its chat
    template into `directory`. Without a tokenizer, one is made of the conversations as `template`
    words them. Returns the last loss in nats per token that the assistant writes. Of one seed and
    the same conversations comes the same model."""
    torch.manual_seed(seed)
    if tokenizer is None:
        texts, _ = render_jinja_template(list(conversations), tools=tools, chat_template=template)
        tokenizer = make_tokenizer(texts, template)
    model = make_model(tokenizer, heads)
    rows = rows_of(tokenizer, conversations, tools)
    loss = imitate(model, rows, steps=steps, batch=batch, lr=lr, seed=seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return loss


def make_tokenizer(texts: Iterable[str], template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-pair encoding in which every frequent word of the texts is one token."""
    tokenizer = FastTokenizer(models.BPE())
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
        chat_template=template,
    )


def word_tokenizer(
    words: Sequence[str], roles: Sequence[str] = ("user", "assistant")
) -> PreTrainedTokenizerFast:
    """For a language of few words between spaces, each of which is a token. Words that it does not
    have are padding. roles: those of the messages."""
    marks = [f"<{role}>" for role in roles]
    vocabulary = {word: n for n, word in enumerate([*marks, "<end>", "<pad>", *words])}
    tokenizer = FastTokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<pad>",
        additional_special_tokens=marks,
        chat_template=WORDS_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, heads: int = 4) -> LlamaForCausalLM:
    """0.1 M parameters; two heads each share their keys. A wide initialisation halves the steps
    until it learns to copy.

    A Llama, because transformers gives every Qwen2 directory Qwen2's own way to split words."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
