"""Builds the model that the run trains: a tiny Llama that passes and bets, each half of the time.

No weights are downloaded. It imitates a player who makes any legal move whatever it holds, so its
exploitability is that of the uniform policy: all strategy is left to learn from rewards. The result
is an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from game import CARDS, DONE, GAME, describe
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentrl.algorithms.sft import Conversation, imitate, rows_of
from agentrl.runners.games import Game

SPECIAL = ["<user>", "<assistant>", "<end>", "<pad>"]
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
    rows = rows_of(tokenizer, [shown for _ in range(500) for shown in demonstrate(dice)])
    imitate(model, rows, steps=200, batch=64, lr=3e-3, seed=seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def demonstrate(dice: random.Random) -> list[Conversation]:
    """The moves of a game in which both players make any."""
    game = Game(GAME)
    state, shown = game.start(), []
    while not state.is_terminal():
        if state.is_chance_node():
            state.apply_action(dice.choice(state.legal_actions()))
            continue
        view = game.view(state, state.current_player())
        move = dice.choice(list(view.legal))
        shown.append([*describe(view), {"role": "assistant", "content": move}])
        state.apply_action(view.legal[move])
    return shown


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Every word is a token."""
    words = {word: number for number, word in enumerate([*SPECIAL, *CARDS, *DONE.values()])}
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
    """0.07 M parameters, so wide in the beginning that it tells the cards apart."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
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
