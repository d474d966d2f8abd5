"""Builds the model that the run trains: a tiny Llama that makes offers in their form, any.

No weights are downloaded. It imitates players who offer whatever is legal, and agree to three
offers out of ten whatever they are. The result is an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from game import describe
from tasks import train
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentrl.algorithms.sft import Conversation, imitate, rows_of
from agentrl.runners.games import Game, View

DEMONSTRATIONS = 3000
STEPS = 300  # of imitation
AGREES = 0.3
SPECIAL = ["<user>", "<assistant>", "<end>", "<pad>"]
WORDS = ["You", "are", "P0", "P1", "Pool:", "My", "values:", "offers:"]
SAID = ["Agree", "Offer:", "Book:", "Hat:", "Basketball:"]
NUMBERS = [f"{number}{mark}" for number in range(11) for mark in (",", "")]
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
    """One turn of a game in which nobody minds what is offered."""
    game = Game("bargaining", train[0]["input"]["parameters"])
    state, turns = game.start(), []
    while not state.is_terminal():
        if state.is_chance_node():
            state.apply_action(dice.choice(state.legal_actions()))
            continue
        view = game.view(state, state.current_player())
        move = chosen(view, dice)
        turns.append([*describe(view), {"role": "assistant", "content": move}])
        state.apply_action(view.legal[move])
    return dice.choice(turns)


def chosen(view: View, dice: random.Random) -> str:
    if "Agree" in view.legal and dice.random() < AGREES:
        return "Agree"
    return dice.choice([move for move in view.legal if move != "Agree"])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Every word is a token, and a number together with its comma."""
    words = {word: i for i, word in enumerate([*SPECIAL, *WORDS, *SAID, *NUMBERS])}
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
        max_position_embeddings=128,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
