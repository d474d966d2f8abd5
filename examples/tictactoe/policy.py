"""Builds the model that the run trains: a tiny Llama that knows the form of a move, and no more.

No weights are downloaded. It imitates players who make any legal move: what is left to learn from
rewards is which. The result is an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from game import MARKS, describe
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentrl.algorithms.sft import Conversation, imitate, rows_of
from agentrl.runners.games import Game

DEMONSTRATIONS = 3000
STEPS = 200  # of imitation
SPECIAL = ["<user>", "<assistant>", "<end>", "<pad>"]
WORDS = ["x", "o", "to", "move:"]
MOVES = [f"{mark}({row},{column})" for mark in MARKS for row in range(3) for column in range(3)]
TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message.role + '>' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content }}<end>{% endgeneration %}
{%- else -%}
{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}"""


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    rows = rows_of(tokenizer, [demonstrate(dice) for _ in range(DEMONSTRATIONS)])
    imitate(model, rows, steps=STEPS, batch=32, lr=5e-3, seed=seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def demonstrate(dice: random.Random) -> Conversation:
    """A legal move in a position of a game in which both players make any."""
    game = Game("tic_tac_toe")
    positions, state = [], game.start()
    while not state.is_terminal():
        view = game.view(state, state.current_player())
        positions.append(view)
        state.apply_action(dice.choice(list(view.legal.values())))
    view = dice.choice(positions)
    return [*describe(view), {"role": "assistant", "content": dice.choice(list(view.legal))}]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Every move is a token, as a word of a prompt and as an answer."""
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS, *MOVES])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[:2],
        chat_template=TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """0.1 M parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
