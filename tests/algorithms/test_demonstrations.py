"""What a policy is taught is what its server would sample."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithms.demonstrations import ConversationReader
from agentrl.algorithms.model.chat import Chat, Codec
from agentrl.algorithms.model.load import end_tokens, load_model
from agentrl.core.errors import TrainingError
from agentrl.tiny.models import rows_of, word_tokenizer

TOOL = {"type": "function", "function": {"name": "query", "parameters": {}}}
ARGUMENTS = '{"a":  "Å", "b":1.0}'
CALL = {"id": "c0", "type": "function", "function": {"name": "query", "arguments": ARGUMENTS}}
USER, LATER = {"role": "user", "content": "Where is Ada?"}, {"role": "user", "content": "Again"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c0", "content": "Oslo"}
SAID = {"role": "assistant", "content": " In Oslo. "}
ENDED = {"role": "assistant", "content": "a<|im_end|>"}
THOUGHT = {"role": "assistant", "content": "<think>\nNorth.\n</think>\n\nOslo"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "an answer": [USER, SAID],
    "two turns": [USER, SAID, LATER, SAID],
    "a system message": [{"role": "system", "content": "Be brief."}, USER, SAID],
    "a tool": [USER, CALLED, RESULT, SAID],
    "two calls": [
        USER,
        CALLED | {"content": "Wait.", "tool_calls": [CALL, CALL]},
        RESULT,
        RESULT,
        SAID,
    ],
    "several in a row": [USER, SAID, CALLED, RESULT, SAID, SAID],
    "a greeting": [{"role": "assistant", "content": "Hello"}, USER, SAID],
}
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}BODY
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PLAIN = "{{- message.content }}"
STRIPS = "{{- message.content | trim }}"
DEFAULT = """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}
"""
FORGETS = """\
{%- if message.role == 'assistant' and not loop.last %}
{{- message.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{- message.content }}{%- endif %}
"""


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_model(tiny_model_dir)[1]


def reader_of(tokenizer: Any, body: str = PLAIN, before: str = "") -> ConversationReader:
    tokenizer.chat_template = before + CHATML.replace("BODY", body)
    return ConversationReader(tokenizer, [tokenizer.eos_token_id])


def learned(reader: ConversationReader, tokenizer: Any, *messages: dict[str, Any]) -> str:
    ((_, said),) = reader.answers({"messages": [*messages]})
    return str(tokenizer.decode(said))


@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if name != "a greeting"])
def test_the_spans_are_those_of_a_template_with_marks(name: str, tiny_model_dir: Path) -> None:
    model, tokenizer = load_model(tiny_model_dir)
    messages = copy.deepcopy(CONVERSATIONS[name])
    for message in messages:  # without marks, arguments are learned as they were written
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = {"a": "x", "b": 1.0}
        message["content"] = message["content"] or ""
    (marked,) = rows_of(tokenizer, [messages], [TOOL])
    reader = ConversationReader(tokenizer, end_tokens(model, tokenizer))
    (row,) = reader.rows({"messages": messages, "tools": [TOOL]})
    assert row.actions.tolist() == marked.actions.tolist()
    assert row.tokens.tolist() == marked.tokens[: len(row.tokens)].tolist()
    assert (row.temperature == 1).all()


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize(
    ("body", "before"),
    [(PLAIN, ""), (STRIPS, ""), (PLAIN, DEFAULT), (FORGETS, DEFAULT)],
    ids=["plain", "strips", "default system", "forgets"],
)
def test_each_answer_follows_the_prompt_of_the_server(
    name: str, body: str, before: str, tokenizer: Any
) -> None:
    """The rows have what the server renders for each call, then what the next call has of it."""
    before += "{%- for tool in tools or [] %}{{- tool.function.name }}{%- endfor %}"
    reader = reader_of(tokenizer, body, before)
    messages = CONVERSATIONS[name]
    chat, codec = Chat(tokenizer, Codec(tokenizer)), Codec(tokenizer)
    asked = [n for n, m in enumerate(messages) if n and m["role"] == "assistant"]
    given = {"messages": copy.deepcopy(messages), "tools": [TOOL]}
    prompts = [chat.encode(copy.deepcopy(messages[:n]), [TOOL]) for n in asked]
    found = reader.answers(given)
    assert [tuple(prompt) for prompt, _ in found] == prompts
    for (_, said), index in zip(found, asked, strict=True):
        text, content = tokenizer.decode(said), messages[index]["content"] or ""
        assert text.startswith(content.strip() if body == STRIPS else content)
        assert text.endswith("<|im_end|>")
        assert text.count(ARGUMENTS) == len(messages[index].get("tool_calls", ()))
        assert codec.encode(text) == said
    actions = [token for row in reader.rows(given) for token in row.tokens[row.actions].tolist()]
    assert actions == [token for _, said in found for token in said]


def test_a_template_that_drops_thinking_gives_new_rows(tokenizer: Any) -> None:
    reader = reader_of(tokenizer, FORGETS)
    rows = reader.rows({"messages": [USER, THOUGHT, LATER, THOUGHT]})
    assert [tokenizer.decode(row.tokens[row.actions]) for row in rows] == [
        "<think>\nNorth.\n</think>\n\nOslo<|im_end|>"
    ] * 2
    assert "North" not in tokenizer.decode(rows[1].tokens[: rows[1].actions[0]])
    assert len(reader_of(tokenizer).rows({"messages": [USER, THOUGHT, LATER, THOUGHT]})) == 1


def test_a_token_across_prompt_and_answer_is_learned(tokenizer: Any) -> None:
    """Byte pairs would join the line feed of the prompt and the answer's "a"."""
    pair = "\n" + "In"
    tokenizer.add_tokens([pair])
    reader = reader_of(tokenizer)
    ((prompt, said),) = reader.answers({"messages": [USER, {"role": "assistant", "content": "In"}]})
    assert tokenizer.decode(prompt).endswith("assistant\n")
    assert tokenizer.decode(said) == "In<|im_end|>"


def test_a_template_without_an_end_uses_the_tokenizers(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reader = reader_of(tokenizer)
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
    )
    for _ in range(2):
        assert learned(reader, tokenizer, USER, SAID | {"content": "Oslo"}) == "Oslo<|im_end|>"
    (record,) = caplog.records
    assert "the policy learns to end them with '<|im_end|>'" in record.getMessage()


def test_several_ends_end_a_turn(tokenizer: Any) -> None:
    """As a model's generation_config may have, besides its tokenizer's."""
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.chat_template = CHATML.replace("BODY", PLAIN).replace("<|im_end|>", "<|endoftext|>")
    reader = ConversationReader(tokenizer, [tokenizer.eos_token_id, end])
    ((_, said),) = reader.answers({"messages": [USER, SAID]})
    assert said[-1] == end
    assert tokenizer.decode(said) == " In Oslo. <|endoftext|>"


def test_words_separated_by_spaces_keep_theirs() -> None:
    tokenizer = word_tokenizer(["a", "b"])
    reader = ConversationReader(tokenizer, [tokenizer.eos_token_id])
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b a "}]
    (row,) = reader.rows({"messages": turn * 2})
    assert tokenizer.decode(row.tokens[row.actions]) == "b a <end> b a <end>"


OPENS = CHATML.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")


@pytest.mark.parametrize(
    ("conversation", "template", "sentence"),
    [
        ({"messages": [USER]}, "", "no message of the assistant"),
        ({"messages": [SAID]}, "", "no message of the assistant"),
        ({"messages": [USER, "hello"]}, "", "not a list of objects"),
        ({"messages": "hello"}, "", "not a list of objects"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "", r"\[1\]: .*says nothing"),
        ({"messages": [USER, SAID, USER, ENDED]}, "", r"\[3\]: the text has '<.im_end"),
        ({"messages": [USER, SAID], "tools": [TOOL]}, "", r"\[1\]: .*does not render tools"),
        ({"messages": [USER, SAID]}, OPENS.replace("BODY", PLAIN), r"\[1\]: .*another way once"),
        ({"messages": [USER, SAID]}, "{{ raise_exception('no') }}", r"\[1\]: .*cannot render"),
        ({"messages": [USER, SAID], "imitate": [0]}, "", r"imitate = \[0\]: give indices .*\[1\]"),
        ({"messages": [USER, SAID], "imitate": ["1"]}, "", r"imitate = \['1'\]: give indices"),
        ({"messages": [USER, SAID], "imitate": "all"}, "", "imitate = 'all': give indices"),
        ({"messages": [USER, SAID], "chat_template_kwargs": 1}, "", "is not an object"),
        ({"messages": [{"content": "a"}, SAID]}, "", r"\[1\]: messages\[0\] has no role"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_names_its_message(
    conversation: dict[str, Any], template: str, sentence: str, tokenizer: Any
) -> None:
    reader = reader_of(tokenizer)
    tokenizer.chat_template = template or tokenizer.chat_template
    with pytest.raises(TrainingError, match=sentence):
        reader.rows(conversation)


def test_thinking_that_the_prompt_opens_is_learned(tokenizer: Any) -> None:
    reader = reader_of(tokenizer)
    tokenizer.chat_template = OPENS.replace("BODY", PLAIN)
    assert learned(reader, tokenizer, USER, THOUGHT) == "North.\n</think>\n\nOslo<|im_end|>"


def test_messages_that_the_template_drops_are_said(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reader = reader_of(
        tokenizer, "{%- if message.role != 'system' %}{{- message.content }}{%- endif %}"
    )
    with caplog.at_level(logging.WARNING, "agentrl"):
        for _ in range(2):
            reader.rows({"messages": [{"role": "system", "content": "Be brief."}, USER, SAID]})
    (record,) = caplog.records
    assert "leaves out the text of messages[0] (role system)" in record.getMessage()
