"""Conversations with tools, rendered by a chat template and read back by the parser of its format.

`tool_roundtrip(name)` is the share of answers that come back the same, at once and character by
character, by tokens of the family's own special ones, and whose prompt goes on with the tokens of
the prompt before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.algorithms.model.chat import Chat, Codec, TextStream, template_message
from agentrl.algorithms.model.templates import templates
from agentrl.algorithms.model.tool_formats import TOOL_FORMAT, ToolCall, load_format
from agentrl.core.types import Json
from agentrl.tiny.models import make_tokenizer

Calls = list[tuple[str, Json]]
Answer = tuple[str, Calls]  # content and calls
PROPERTIES: Json = {
    "text": {"type": "string"}, "number": {"type": "number"}, "count": {"type": "integer"},
    "flag": {"type": "boolean"}, "list": {"type": "array"}, "map": {"type": "object"},
    "maybe": {"type": ["integer", "null"]}, "from": {"type": "string"},
}  # fmt: skip
TOOLS: list[dict[str, Json]] = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (
        ("query", {"type": "object", "properties": PROPERTIES}),
        ("list_tables", {"type": "object", "properties": {}}),
    )
]
TEXTS = [
    "SELECT 1",
    "say \"hello\" and 'bye'",
    'back\\slash and \\n, and "\\"',
    "two\nlines\n\tand a tab",
    "\u00e9\u4f60\U0001f600 \u2028",
    "",
    " spaces around ",
    "<tool_call> and </tool_call>",
    '[TOOL_CALLS][{"name": "query", "arguments": {}}]',
    "} ] ) { [ ( , ; = ':",
    '{"name": "query", "parameters": {}}',
    "functools[] [query()] <|python_tag|> ```",
    "<think>no</think>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "</parameter> </function>",
    "True",
    "12",
]
ARGUMENTS: list[Json] = [
    *({"text": text} for text in TEXTS),
    {},
    {"number": 1.5, "count": -3, "flag": True},
    {"flag": False, "maybe": None},
    {"list": [1, "two", [True, None], {"a": "b"}], "map": {"x": {"y": ['"', "\\"]}}},
    {"from": "here", "text": "there"},
]
CONTENTS = [
    "Let me look.",
    "Two lines:\n- one\n- two",
    "A list [1, 2], a set {3} and f(x) = [y]; done.",
    "<think>\nI may call query.\n</think>\n\nLooking.",
    "\u00dcber \U0001f600",
    'He said "{" and "[".',
]


def answers() -> Iterator[Answer]:
    """Contents with their calls."""
    yield from ((content, []) for content in CONTENTS)
    yield from (("", [("query", arguments)]) for arguments in ARGUMENTS)
    for content, arguments in zip(CONTENTS, ARGUMENTS[-len(CONTENTS) :], strict=True):
        yield content, [("query", arguments)]
        yield content, [("list_tables", {}), ("query", arguments), ("list_tables", {})]
    yield "", [("query", {"text": text}) for text in TEXTS]


def conversation(answer: Answer, *, system: bool) -> list[dict[str, Json]]:
    """A question and its answer, the results of its calls, another answer and another question."""
    content, calls = answer
    written = [
        {"id": f"call0000{n}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        for n, (name, arguments) in enumerate(calls)
    ]  # fmt: skip
    said: dict[str, Json] = {"role": "assistant", "content": content}
    results: list[dict[str, Json]] = [
        {"role": "tool", "tool_call_id": call["id"], "content": "3 rows"} for call in written
    ]
    return [
        *([{"role": "system", "content": "Be brief."}] if system else []),
        {"role": "user", "content": "What is there?"},
        said | ({"tool_calls": written} if written else {}),
        *results,
        *([{"role": "assistant", "content": "There are 3."}] if results else []),
        {"role": "user", "content": "Thanks."},
    ]


@cache
def family_tokenizer(name: str) -> Any:
    """A tokenizer with the special tokens of a template's family, which has the template."""
    template = templates()[name]
    parser = load_format(template.tool_format, Path())
    tokenizer = make_tokenizer([*CONTENTS, *TEXTS], template.text)
    marks = [*template.tokens, template.end]
    if name != "mistral_v3":  # an older tokenizer has fewer
        marks += [mark for mark in parser.marks if mark[0] in "<["]
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(marks))})
    tokenizer.eos_token = template.end
    tokenizer.init_kwargs[TOOL_FORMAT] = template.tool_format
    return tokenizer


def rendered(name: str, answer: Answer) -> str:
    """What a model would write for an answer, without the end of its turn."""
    tokenizer = family_tokenizer(name)
    messages = [template_message(dict(m), 0) for m in conversation(answer, system=False)[:2]]
    options = {"tools": TOOLS, "tokenize": False}
    before = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, **options)
    after = str(tokenizer.apply_chat_template(messages, **options))
    return after.removeprefix(before).partition(tokenizer.eos_token)[0]


def read(codec: Codec, tokens: list[int], size: int) -> Answer:
    """The answer of these tokens, of which `size` arrive at once; 0: all."""
    parser = codec.parser(tools=json.dumps(TOOLS).encode())
    stream, found = TextStream(codec), list[str | ToolCall]()
    for start in range(0, len(tokens), size or len(tokens)):
        text = stream.push(tokens[start : start + (size or len(tokens))])
        for piece in text if size else [text]:
            found += parser.push(piece)
    found += parser.push(stream.finish()) + parser.finish()
    return split(found)


def split(found: list[str | ToolCall]) -> Answer:
    content = "".join(part for part in found if isinstance(part, str))
    functions = [part.function for part in found if isinstance(part, ToolCall)]
    return content, [(one.name, json.loads(one.arguments)) for one in functions]


def failures(name: str, tokenizer: Any = None) -> list[str]:
    """What is wrong with each of a template's conversations; empty where nothing is. tokenizer: of
    a model that has been given the template; default: one made for its family."""
    tokenizer = tokenizer or family_tokenizer(name)
    codec = Codec(tokenizer)
    chat = Chat(tokenizer, codec)
    both = [(answer, system) for answer in answers() for system in (False, True)]
    return [failure(chat, codec, answer, system, tokenizer.eos_token_id) for answer, system in both]


def failure(chat: Chat, codec: Codec, answer: Answer, system: bool, eos: int) -> str:
    messages, asked = conversation(answer, system=system), 1 + system
    prompt = chat.encode(messages[:asked], TOOLS)
    after = chat.encode(messages[: asked + 1], TOOLS, add_generation_prompt=False)
    if after[: len(prompt)] != prompt:
        return f"{answer}: the answer does not continue its prompt"
    said = list(after[len(prompt) : after.index(eos, len(prompt))])
    said_and_end = (*prompt, *said, eos)
    if chat.encode(messages, TOOLS)[: len(said_and_end)] != said_and_end:
        return f"{answer}: the conversation does not continue the answer"
    for size in (0, 1):
        if (back := read(codec, said, size)) != answer:
            return f"{answer} came back as {back}"
    return ""


def tool_roundtrip(name: str, tokenizer: Any = None) -> float:
    """The share of conversations that come back the same. tokenizer: as `failures`."""
    found = failures(name, tokenizer)
    return found.count("") / len(found)
