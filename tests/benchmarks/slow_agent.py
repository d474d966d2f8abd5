"""The agent of examples/staff on the plain OpenAI client, with a tool that takes a while: a
lognormal time of 3 s, sigma 1.2, drawn by call."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "staff"))

from database import connect
from openai import AsyncOpenAI
from policy import PROMPT, TOOLS

from agentrl.algorithms.simulation import lognormal

SECONDS, SIGMA = 3.0, 1.2
CALLS = 5
client = AsyncOpenAI()


async def agent(question: str) -> str:
    messages: list[Any] = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": question},
    ]
    for number in range(CALLS):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            found = look_up(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        await asyncio.sleep(lognormal(SECONDS, SIGMA, question, number, message.tool_calls[0].id))
    return ""


def look_up(arguments: str) -> str:
    try:
        with closing(connect()) as staff:
            rows = staff.execute(json.loads(arguments)["sql"]).fetchall()
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
    return "\n".join(", ".join(map(str, row)) for row in rows) or "no rows"
