"""Build the policy: a tiny LLaVA that has seen single charts, but reads a report wrongly.

No weights are downloaded. A new model, its vision tower too, imitates two kinds of conversations.
In one it names the highest bar of a picture, which stands for the pre-training of an image-text
model. In the other it is the agent, and names a wrong shop and a wrong day three times out of four:
what to look at, and what to answer, the policy learns from rewards."""

from __future__ import annotations

import json
import os
import random
from base64 import b64encode
from pathlib import Path

os.environ.setdefault("OPENAI_API_KEY", "unused")  # agent.py makes its clients when imported

from agent import PROMPT, look
from charts import DAYS, FRONT, SHOPS, Report, page, report
from langchain_core.utils.function_calling import convert_to_openai_tool
from tasks import QUESTION, train

from agentrl.tiny import Conversation
from agentrl.tiny.vision import imitator

READINGS, DEMONSTRATIONS, STEPS = 800, 600, 700
CORRECT = 0.25  # fraction of right choices in demonstrations
WRONG = {
    name: names[number - 1] for names in (list(SHOPS), DAYS) for number, name in enumerate(names)
}
TOOLS = [convert_to_openai_tool(look)]
CALL = '<tool_call>\n{"name": "look", "arguments": {"name": "', '"}}\n</tool_call>'


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer, image processor and chat template into `directory`."""
    rng = random.Random(seed)
    shown = [read(rng) for _ in range(READINGS)]
    shown += [demonstrate(rng) for _ in range(DEMONSTRATIONS)]
    imitator(directory, shown, seed=seed, tools=TOOLS, tokens=CALL, steps=STEPS, lr=1e-3)


def read(rng: random.Random) -> Conversation:
    """Somebody shows a page and asks for its highest bar."""
    number, name = rng.randrange(len(train)), rng.choice((FRONT, FRONT, *SHOPS))
    asked = [{"type": "text", "text": "Which bar is the highest?"}, picture(number, name)]
    answer = {"role": "assistant", "content": highest(report(number), name)}
    return [{"role": "system", "content": PROMPT}, {"role": "user", "content": asked}, answer]


def demonstrate(rng: random.Random) -> Conversation:
    """The messages of one rollout, as LangChain sends them."""
    number = rng.randrange(len(train))
    shop = choice(highest(report(number), FRONT), rng)
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": QUESTION}]
    for name in (FRONT, shop):
        function = {"name": look.name, "arguments": json.dumps({"name": name})}
        call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        messages += [call, {"role": "tool", "content": [picture(number, name)]}]
    day = choice(highest(report(number), shop), rng)
    return [*messages, {"role": "assistant", "content": day}]


def highest(seen: Report, name: str) -> str:
    return seen.best if name == FRONT else seen.best_day(name)


def choice(right: str, rng: random.Random) -> str:
    return right if rng.random() < CORRECT else WRONG[right]


def picture(number: int, name: str) -> dict[str, object]:
    url = f"data:image/png;base64,{b64encode(page(number, name)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
