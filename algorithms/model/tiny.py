"""Tiny models, trained on the spot: a tokenizer and a Llama that imitate given conversations.

Examples and benchmarks use them so that nothing is downloaded: 0.1 M parameters that write one
format fluently, as an ordinary Hugging Face checkpoint. They are trained by supervised fine-tuning
on the assistant's turns: the one loss with psi = 1/N on each of the N action tokens of a batch.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model.cpu_threads import thread_tuner
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.packing import forward_logprobs, pack_rows
from agentrl.errors import TrainingError
from agentrl.types import Json

Conversation = list[dict[str, Json]]  # chat messages
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{{- message.content }}
{%- for tool in tools or [] if loop.first %}
{{- '\\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + '): ' }}
{{- tool.function.description }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML with the tool calls of Qwen and Hermes, and in the first message each tool in one line."""
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
    words them. tools: those that the agent offers with each call, in the words of the OpenAI API.
    Returns the last loss in nats per token that the assistant writes. Of one seed and the same
    conversations comes the same model.

    Raises TrainingError when conversations call tools and none are given."""
    if not tools and any(said.get("tool_calls") for each in conversations for said in each):
        raise TrainingError(
            "the conversations call tools: give them to `imitator` as tools=[...], as the agent "
            "sends them, so that the model learns from prompts like the agent's"
        )
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


def rows_of(
    tokenizer: Tokenizer,
    conversations: Sequence[Conversation],
    tools: list[dict[str, Json]] | None = None,
) -> list[TokenRow]:
    """One row per conversation, its actions being what stands between `{% generation %}` and
    `{% endgeneration %}` in the chat template.

    Raises TrainingError when the template marks nothing as generated."""
    template = tokenizer.get_chat_template(None, tools)
    texts, marked = render_jinja_template(
        list(conversations),
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    found = zip(encoded["input_ids"], encoded["offset_mapping"], marked, strict=True)
    rows = []
    for number, (tokens, offsets, spans) in enumerate(found):
        actions = torch.tensor(list(_tokens_within(offsets, spans)), dtype=torch.int64)
        if not actions.numel():
            raise TrainingError(
                f"the chat template marks no assistant tokens of conversation {number}: put "
                "{% generation %} and {% endgeneration %} around what the model writes"
                if not spans
                else f"the assistant writes nothing in conversation {number}"
            )
        ones = torch.ones(len(actions))
        rows.append(
            TokenRow(torch.tensor(tokens), actions, 0 * ones, ones, torch.zeros_like(actions))
        )
    return rows


def _tokens_within(
    offsets: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> Iterator[int]:
    """The tokens, except the first, of which a character is in one of the spans of the text."""
    before = 0
    for number, (start, end) in enumerate(offsets):
        start = start if start < end else before  # a space, which some tokenizers leave out
        before = end
        if number and any(start < last and first < end for first, last in spans):
            yield number


def imitate(
    model: PreTrainedModel,
    rows: Sequence[TokenRow],
    *,
    steps: int,
    batch: int,
    lr: float,
    warmup: int = 20,
    betas: tuple[float, float] = (0.9, 0.98),
    seed: int = 0,
) -> float:
    """AdamW on random batches of `batch` rows, or of all where these are fewer, learning rate
    rising for `warmup` steps and falling linearly to zero. Returns the mean loss in nats per action
    token over the last tenth."""
    dice = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=0.0, fused=True)
    threads = thread_tuner(model.num_parameters(), "imitation computes", torch.get_num_threads())
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / warmup, 1 - step / steps)
        (pack,) = pack_rows(dice.sample(rows, min(batch, len(rows))), "trie", sys.maxsize)
        with threads.working(len(pack.tokens)):
            loss = -forward_logprobs(model, pack).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


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
