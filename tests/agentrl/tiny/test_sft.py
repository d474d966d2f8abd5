from pathlib import Path

import pytest
import torch

from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import pack_rows
from agentrl.core.errors import TrainingError
from agentrl.tiny.models import imitate, rows_of, word_tokenizer

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
"""
CONVERSATIONS = [
    [
        {"role": "user", "content": f"Say {word}"},
        {"role": "assistant", "content": word},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": word},
    ]
    for word in ("query", "name", "Oslo", "team")
]


def test_actions_are_exactly_what_the_assistant_wrote(tiny_model_dir: Path) -> None:
    _, tokenizer = load_model(tiny_model_dir)
    tokenizer.chat_template = TEMPLATE
    for conversation, row in zip(CONVERSATIONS, rows_of(tokenizer, CONVERSATIONS), strict=True):
        text = tokenizer.decode(row.tokens[row.actions])
        word = conversation[1]["content"]
        assert text == f"{word}<|im_end|>{word}<|im_end|>"
        assert (row.temperature == 1).all()


def test_an_answer_may_begin_with_a_space() -> None:
    tokenizer = word_tokenizer(["a", "b"])
    (row,) = rows_of(
        tokenizer,
        [[{"role": "user", "content": "a"}, {"role": "assistant", "content": " b a "}] * 2],
    )
    assert tokenizer.decode(row.tokens[row.actions]) == "b a <end> b a <end>"


def test_a_template_without_generation_is_refused(tiny_model_dir: Path) -> None:
    _, tokenizer = load_model(tiny_model_dir)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(TrainingError, match="generation"):
        rows_of(tokenizer, CONVERSATIONS)


def test_imitation_makes_the_conversations_likely_and_repeats_itself(tiny_model_dir: Path) -> None:
    losses = []
    for _ in range(2):
        model, tokenizer = load_model(tiny_model_dir)
        tokenizer.chat_template = TEMPLATE
        rows = rows_of(tokenizer, CONVERSATIONS)
        (pack,) = pack_rows(rows, "rows", 10_000)
        before = -forward_logprobs(model, pack).mean()
        losses.append(imitate(model, rows, steps=30, batch=4, lr=1e-2, warmup=5, seed=1))
        with torch.no_grad():
            after = -forward_logprobs(model, pack).mean()
        assert after < 0.2 * before
    assert losses[0] == losses[1]


def test_fewer_conversations_than_a_batch_are_one_batch(tiny_model_dir: Path) -> None:
    model, tokenizer = load_model(tiny_model_dir)
    tokenizer.chat_template = TEMPLATE
    rows = rows_of(tokenizer, CONVERSATIONS)
    assert imitate(model, rows, steps=2, batch=len(rows) + 1, lr=1e-2, warmup=1) > 0
