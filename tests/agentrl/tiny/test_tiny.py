"""A tiny model speaks as the conversations it was shown, and is a checkpoint like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.algorithms.model.load import load_model
from agentrl.core.errors import TrainingError
from agentrl.tiny.models import TEMPLATE, Conversation, imitator, make_tokenizer, word_tokenizer

WORDS = ["Oslo", "Lima", "Cairo", "Delhi"]


def echo(word: str) -> Conversation:
    return [
        {"role": "system", "content": "Repeat."},
        {"role": "user", "content": f"say {word}"},
        {"role": "assistant", "content": word},
    ]


def test_it_says_what_it_was_shown(tmp_path: Path) -> None:
    loss = imitator(tmp_path, [echo(word) for word in WORDS * 8], seed=0, steps=40)
    assert loss < 0.1
    model, tokenizer = load_model(tmp_path)
    for word in WORDS:
        prompt = tokenizer.apply_chat_template(
            echo(word)[:2], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        said = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
        assert tokenizer.decode(said) == f"{word}<|im_end|>"


def test_conversations_that_call_tools_want_the_tools(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": '{"city": "Oslo"}'}}
    shown: Conversation = [
        {"role": "user", "content": "Where is Oslo?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "Norway"},
        {"role": "assistant", "content": "Norway"},
    ]
    with pytest.raises(TrainingError, match=r"pass them to `imitator` as tools="):
        imitator(tmp_path, [shown] * 8, seed=0, steps=1)
    properties = {"city": {"type": "string"}}
    tool = {"name": "find", "description": "Its country.", "parameters": {"properties": properties}}
    tools = [{"type": "function", "function": tool}]
    imitator(tmp_path, [shown] * 16, seed=0, tools=tools, steps=1)
    _, tokenizer = load_model(tmp_path)
    text = tokenizer.apply_chat_template(shown, tools=tools, tokenize=False)
    assert "Where is Oslo?\nfind(city): Its country.<|im_end|>" in text
    assert (
        '<tool_call>\n{"name": "find", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
        in text
    )


def test_a_frequent_word_is_one_token_with_the_space_after_it() -> None:
    tokenizer = make_tokenizer(["see Oslo and Lima, then Oslo again"] * 20)
    pieces = [tokenizer.decode([token]) for token in tokenizer("Oslo and Lima")["input_ids"]]
    assert pieces == ["Oslo ", "and ", "Lima"]


def test_what_the_assistant_writes_is_marked_and_prompts_are_prefixes() -> None:
    tokenizer = make_tokenizer([TEMPLATE, *WORDS] * 4)
    encoded = tokenizer.apply_chat_template(
        echo("Oslo"), return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = encoded["input_ids"], encoded["assistant_masks"]
    marked = [token for token, mine in zip(tokens, mask, strict=True) if mine]
    assert tokenizer.decode(marked) == "Oslo<|im_end|>"
    prompt = tokenizer.apply_chat_template(echo("Oslo")[:2], add_generation_prompt=True)
    assert tokens[: mask.index(1)] == prompt["input_ids"]


def test_every_word_and_every_turn_is_one_token() -> None:
    tokenizer = word_tokenizer(["say", "Repeat.", *WORDS], ("system", "user", "assistant"))
    tokens = tokenizer.apply_chat_template(echo("Lima"))["input_ids"]
    pieces = [tokenizer.decode([token]) for token in tokens]
    spoken = ["<user>", "say", "Lima", "<assistant>", "Lima", "<end>"]
    assert pieces == ["<system>", "Repeat.", *spoken]
    tokenizer = word_tokenizer(["say", *WORDS])
    tokens = tokenizer.apply_chat_template(echo("Lima")[1:])["input_ids"]
    assert [tokenizer.decode([token]) for token in tokens] == spoken
