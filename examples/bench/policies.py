"""Builds the models that the runs train: tiny Llamas that know the form of every answer.

Each imitates a player of its task who does the best thing now and then, and anything else that is
possible at random. So a run starts with some success, and what is left to learn is which answers
are right. How often is chosen for each task so that broadcast credit learns it, but not at once, by
seeds that are not reported. No weights are downloaded; the results are ordinary Hugging Face
checkpoints.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import tools
from tokenizers import decoders
from tools import WORDS, Message, Tool
from transformers import PreTrainedTokenizerFast

from agentrl.core.processes import run_blocking
from agentrl.tiny import Conversation, imitator, word_tokenizer

Answer = tuple[str, str]  # the name of a tool, or nothing, and its argument or what is said
Player = Callable[[list[Message], list[Tool]], Answer]
Agent = Callable[[Any], Awaitable[Any]]
DEMONSTRATIONS, STEPS = 6000, 500  # conversations, steps of imitation
OPEN = '<tool_call>\n{{"name": "{}", "arguments": {{"{}": "'
NEXT, CLOSE = '", "{}": "', '"}}\n</tool_call>'
TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message.role + '>' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}<end>{% endgeneration %}
{%- else -%}
{{ message.content }}
{%- for tool in tools or [] if loop.first and message.role == 'system' %}
{{- ' ' + tool.function.name }}
{%- endfor %}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}
"""


class Scripted:
    """Stands in for the client of `tools`: a function of what was asked answers. It keeps every
    conversation as the model would see it last."""

    def __init__(self, player: Player) -> None:
        self.player, self.seen = player, []

    async def complete(self, model: str, messages: list[Message], tools: Sequence[Tool]) -> Message:
        name, text = self.player(messages, list(tools))
        answer: Message = {"role": "assistant", "content": text}
        shown = answer
        if name:
            *seen, chosen = parameters_of(tools, name)
            said = messages[-1]["content"].split()
            given = {each: said[said.index(each) + 1] for each in seen} | {chosen: text}
            answer, shown = (
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call",
                            "type": "function",
                            "function": {"name": name, "arguments": written},
                        }
                    ],
                }
                for written in (json.dumps(given), given)
            )
        self.seen.append((list(messages), shown, list(tools)))
        return answer


def parameters_of(tools: Sequence[Tool], name: str) -> list[str]:
    function = next(one["function"] for one in tools if one["function"]["name"] == name)
    return list(function["parameters"]["required"])


def anything(messages: list[Message], tools: list[Tool]) -> Answer:
    """Any answer that is possible, with equal chances: a player."""
    return random.choice(options(tools))


def options(tools: list[Tool]) -> list[Answer]:
    """All calls of these tools; without tools, the words that roles of a team say."""
    functions = [one["function"] for one in tools]
    return [
        (one["name"], choice)
        for one in functions
        for schema in one["parameters"]["properties"].values()
        for choice in schema.get("enum", ())
    ] or [("", word) for word in WORDS]


def mixed(best: Player, share: float) -> Player:
    """The best answer with this chance, else any."""
    return lambda *asked: best(*asked) if random.random() < share else anything(*asked)


def play(agent: Agent, player: Player, inputs: Sequence[Any]) -> tuple[list[Any], Scripted]:
    """Results of the agent on these inputs, and what was said."""
    client, before = Scripted(player), tools.client
    tools.client = client

    async def all_of_them() -> list[Any]:
        return [await agent(value) for value in inputs]

    try:
        return run_blocking(all_of_them()), client
    finally:
        tools.client = before


def conversations(client: Scripted, n: int) -> list[Conversation]:
    """What was said, a conversation that grew once: not where the next one begins with it."""
    following = [before for before, *_ in client.seen[1:]] + [[]]
    shown = [
        (before, answer)
        for (before, answer, _), after in zip(client.seen, following, strict=True)
        if len(after) <= len(before) or after[: len(before)] != before
    ]
    return [[*map(as_shown, before), answer] for before, answer in shown[:n]]


def as_shown(message: Message) -> Message:
    """A message as the chat template gets it: arguments of tools are read."""
    calls = [
        {"type": "function", "function": {**c["function"],
         "arguments": json.loads(c["function"]["arguments"])}}
        for c in message.get("tool_calls", ())
    ]  # fmt: skip
    return {**message, "tool_calls": calls} if calls else message


def tokenizer_of(shown: Sequence[Conversation], known: Sequence[Tool]) -> PreTrainedTokenizerFast:
    """Every word is one token, and so is all of a call before its argument, and after it."""
    answers = [text for _, text in options(list(known))] + [text for _, text in options([])]
    said = [word for chat in shown for m in chat for word in (m["content"] or "").split()]
    names = [one["function"]["name"] for one in known]
    words = sorted({*said, *answers, *names})
    tokenizer = word_tokenizer(words, ("system", "user", "tool", "assistant"))
    frames = {name: parameters_of(known, name) for name in names}
    opened = [OPEN.format(name, first) for name, (first, *_) in frames.items()]
    between = [NEXT.format(each) for _, *others in frames.values() for each in others]
    tokenizer.add_tokens([*opened, *between, CLOSE])
    tokenizer.chat_template = TEMPLATE
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer


def build(
    agent: Agent,
    best: Player,
    tasks: Sequence[dict[str, Any]],
    share: float,
    folder: Path,
    seed: int,
    steps: int = STEPS,
) -> None:
    """Write a model that does the best thing with the chance `share`, else anything."""
    random.seed(seed)
    inputs = [tasks[n % len(tasks)]["input"] for n in range(DEMONSTRATIONS)]
    _, client = play(agent, mixed(best, share), inputs)
    shown = conversations(client, DEMONSTRATIONS)
    known = list(
        {tool["function"]["name"]: tool for *_, tools in client.seen for tool in tools}.values()
    )
    tokenizer = tokenizer_of(shown, known)
    imitator(
        folder,
        shown,
        seed=seed,
        tools=known or None,
        tokenizer=tokenizer,
        template=TEMPLATE,
        steps=steps,
        batch=32,
    )
