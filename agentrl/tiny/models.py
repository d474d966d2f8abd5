"""Tiny models trained on given conversations: a tokenizer and a Llama of 0.1 M parameters.

Examples and benchmarks use them to avoid downloads. They write one format fluently and are ordinary
Hugging Face checkpoints. They are trained by supervised fine-tuning on the assistant's turns:
psi = 1/N for each of the N action tokens of a batch.
"""

from __future__ import annotations

import logging
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
from agentrl.algorithms.demonstrations import format_problem
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.lm_head import thread_tuner
from agentrl.algorithms.model.packing import pack_rows
from agentrl.core.errors import TrainingError
from agentrl.core.files import share_weights, steps_left
from agentrl.core.processes import log_phase
from agentrl.core.types import Json

log = logging.getLogger("agentrl.algorithm")
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
"""ChatML with the tool calls of Qwen and Hermes; the first message lists one tool per line."""
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
"""Each turn starts with a token of its role; the model's turns end with "<end>"."""


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
    """Train a model to imitate the assistant of the conversations; write it, its tokenizer and its
    chat template into `directory`. Returns the final loss in nats per assistant token.

    tokenizer: by default trained on the conversations rendered by `template`. tools: the tools that
    the agent sends with each call, in the format of the OpenAI API. Deterministic for a seed.
    Raises TrainingError if conversations call tools and none are given."""
    if not tools and any(message.get("tool_calls") for each in conversations for message in each):
        raise TrainingError(
            "the conversations call tools: pass them to `imitator` as tools=[...], as the agent "
            "sends them, so that the model learns from prompts like the agent's"
        )
    torch.manual_seed(seed)
    if tokenizer is None:
        texts, _ = render_jinja_template(list(conversations), tools=tools, chat_template=template)
        tokenizer = make_tokenizer(texts, template)
    model = make_model(tokenizer, heads)
    rows = rows_of(tokenizer, conversations, tools)
    loss = imitate(model, rows, steps=steps, batch=batch, lr=lr, seed=seed)
    said = f"the tiny model imitates {len(rows)} conversations with a loss of {loss:.3f} per token"
    if problem := format_problem(model, rows):
        log.warning("%s, %s", said, problem)
    else:
        log_phase(log, said)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    share_weights(Path(directory))
    return loss


def rows_of(
    tokenizer: Tokenizer,
    conversations: Sequence[Conversation],
    tools: list[dict[str, Json]] | None = None,
) -> list[TokenRow]:
    """One row per conversation. Its actions are the tokens between `{% generation %}` and
    `{% endgeneration %}` in the chat template; raises TrainingError if there are none."""
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
    """Yield the tokens, except the first, that overlap one of the spans of the text."""
    before = 0
    for number, (start, end) in enumerate(offsets):
        start = start if start < end else before  # empty for a space in some tokenizers
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
    """Train with AdamW on random batches of at most `batch` rows, with a learning rate that rises
    for `warmup` steps and falls linearly to zero. Returns the mean loss in nats per action token
    over the last tenth of the steps."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=0.0, fused=True)
    threads = thread_tuner(model.num_parameters(), "imitation computes", torch.get_num_threads())
    losses, report = [], steps_left(log, "imitating the conversations", steps)
    for step in range(steps):
        report(step)
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / warmup, 1 - step / steps)
        (pack,) = pack_rows(rng.sample(rows, min(batch, len(rows))), "trie", sys.maxsize)
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
    """Train a byte-pair encoding in which every frequent word of the texts is one token."""
    tokenizer = FastTokenizer(models.BPE())
    # A word includes the space after it, so that a name is the same token in a question, in SQL and
    # in a result, and the model can copy it.
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
    marks = re.compile(r"<[^<>]+>")  # separate tokens
    tokenizer.train_from_iterator((part for text in texts for part in marks.split(text)), trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def word_tokenizer(
    words: Sequence[str], roles: Sequence[str] = ("user", "assistant"), **named: str
) -> PreTrainedTokenizerFast:
    """A tokenizer for a small vocabulary separated by spaces, one token per word; unknown words
    become padding. roles: of messages. named: special tokens by attribute."""
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
        **named,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, heads: int = 4) -> LlamaForCausalLM:
    """A Llama of 0.1 M parameters, in which two heads share their keys. The wide initialisation
    halves the steps until it learns to copy.

    It is not a Qwen2, because transformers would load the tokenizer with Qwen2's rules for
    splitting words."""
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
