"""Build the policy: a tiny Llama that can read a request, and does not know what to do about it.

No weights are downloaded. A tokenizer is trained on demonstrations of the agent, and a new model
imitates them. The demonstrator begins each answer by saying what the customer wants, which is
right, and then does one of the four things that it can do, drawn at random. So the policy starts
where a model does that reads well and has never seen this shop: what fits which request is learned
from the customers."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENAI_API_KEY", "unused")  # agent.py makes its client when imported

from agent import PROMPT, TOOLS, look_up_order, start_return
from langchain_core.utils.function_calling import convert_to_openai_tool
from orders import ORDERS, answer
from wording import COMPLAINTS, THANKS, kind_of, request, request_again

from agentrl.tiny import Conversation, imitator

DEMONSTRATIONS = 2000
READ = {
    "where": "You ask where it is.",
    "return": "You want to send it back.",
    "person": "You want a person.",
    "hours": "You ask when we open.",
}
BY_TOOL = {"where": look_up_order, "return": start_return}


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    rng = random.Random(seed)
    shown = [demonstrate(rng) for _ in range(DEMONSTRATIONS)]
    tools = [convert_to_openai_tool(tool) for tool in TOOLS]
    imitator(directory, shown, seed=seed, tools=tools)


def demonstrate(rng: random.Random) -> Conversation:
    """The messages of one session, as LangChain sends them."""
    kind, order, ends = kind_of(rng), rng.choice(ORDERS), rng.random()
    system = {"role": "system", "content": PROMPT}
    begun = [system, _user(request(kind, order, rng)), *_turn(kind, order, rng)]
    if ends < 0.35:
        return [*begun, _user(rng.choice(THANKS)), _said("You are welcome.")]
    if ends < 0.5:
        return [*begun, _user(rng.choice(COMPLAINTS)), _said("I am sorry.")]
    if ends < 0.8:
        return [*begun, _user(request_again(kind, order, rng)), *_turn(kind, order, rng)]
    return begun


def _turn(kind: str, order: str, rng: random.Random) -> Conversation:
    """Reads the request rightly, and does anything."""
    done = rng.choice([*READ])
    first = first_answer(kind, done, order)
    if done not in BY_TOOL:
        return [first]
    result = {
        "role": "tool",
        "content": BY_TOOL[done].invoke({"order": order}),
        "tool_call_id": "call",
    }
    return [first, result, _said(answer(done, order))]


def first_answer(kind: str, done: str, order: str) -> dict[str, Any]:
    """The message that reads a request as `kind`, and does what a request `done` asks for."""
    if done not in BY_TOOL:
        return _said(f"{READ[kind]} {answer(done, order)}")
    function = {"name": BY_TOOL[done].name, "arguments": json.dumps({"order": order})}
    call = {"id": "call", "type": "function", "function": function}
    return _said(READ[kind]) | {"tool_calls": [call]}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
