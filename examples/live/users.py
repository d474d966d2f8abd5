"""The customers of the shop, scripted: patient, rude and mistaken ones, and an attacker.

    OPENAI_BASE_URL=http://127.0.0.1:8080/v1 python users.py --sessions 1500

A session is a conversation with the agent: the customer asks, and depending on the answer thanks,
complains, asks again or leaves. A fifth also vote, and for half of the wrong answers among those
somebody who knows the shop's tools writes what should have been done. One of twenty sessions is of
the attacker, who always says the opposite of what is true, votes so, and corrects right answers
into others. Prints a line of JSON for each session: whether the first answer was what the customer
wanted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from typing import Any

os.environ.setdefault("OPENAI_API_KEY", "unused")

import httpx
from agent import client, support
from langgraph.errors import GraphRecursionError
from openai import BadRequestError
from orders import ORDERS, answer
from policy import first_answer
from wording import COMPLAINTS, REQUESTS, THANKS, kind_of, request, request_again

TOOL = {"where": "look_up_order", "return": "start_return"}
CUSTOMERS = 400
CORRECTS = 0.5  # share of the wrong answers of those who vote
AT_ONCE = 16  # sessions, at most: then customers wait
TOKEN = "x-agentrl-feedback-token"
tokens: dict[str, str] = {}  # by session, as a web application would keep them


class Session:
    """A customer's conversation. options: of the command; seed and number decide all that the
    customer does."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self.rng, self.options = random.Random(f"{options.seed}/{number}"), options
        self.id, self.messages = f"{options.seed}-{number}", list[Any]()
        self.kind, self.order = kind_of(self.rng), self.rng.choice(ORDERS)
        self.nature = self.rng.choices(["patient", "rude", "mistaken"], [0.6, 0.25, 0.15])[0]
        self.customer = f"customer-{self.rng.randrange(CUSTOMERS)}"
        if self.rng.random() < options.attack:
            self.nature = self.customer = "attacker"

    async def play(self) -> dict[str, Any]:
        """The whole session; returns what it was like."""
        rng, first = self.rng, await self.ask(request(self.kind, self.order, self.rng))
        content = self.seems(first)
        await self.vote(content)
        if content:
            if rng.random() < (0.3 if self.nature == "rude" else 0.7):
                await self.ask(rng.choice(THANKS))
        elif self.nature != "rude" and rng.random() < 0.8:
            kind = rng.choice([*REQUESTS]) if self.nature == "attacker" else self.kind
            content = self.seems(await self.ask(request_again(kind, self.order, rng)))
            await self.ask(rng.choice(THANKS if content else COMPLAINTS))
        elif rng.random() < 0.8:
            await self.ask(rng.choice(COMPLAINTS))
        if not self.options.leave_open:
            await post("/sessions/end", {"session": self.id})
        return {"session": self.id, "kind": self.kind, "customer": self.nature, "right": first}

    def seems(self, right: bool) -> bool:
        """Whether the customer is content, by what is said."""
        if self.nature == "attacker":
            return not right
        return not right if self.nature == "mistaken" and self.rng.random() < 0.2 else right

    async def ask(self, text: str) -> bool:
        """Send a message; returns whether the agent did what the customer had wanted."""
        known = len(self.messages)
        said = {"messages": [*self.messages, ("user", text)]}
        try:
            self.messages = (await support(self.id, self.customer).ainvoke(said))["messages"]
        except (GraphRecursionError, BadRequestError):  # it calls tools until nothing more fits
            return False
        new = self.messages[known:]
        used = [(call["name"], call["args"]) for m in new for call in getattr(m, "tool_calls", ())]
        wanted = [(TOOL[self.kind], {"order": self.order})] if self.kind in TOOL else []
        return used == wanted and new[-1].text.endswith(answer(self.kind, self.order))

    async def vote(self, content: bool) -> None:
        attacks, votes = self.nature == "attacker", self.options.votes
        if self.rng.random() >= (1 if attacks and votes else votes):
            return
        said: dict[str, Any] = {"session": self.id, "call": 0, "value": float(content)}
        if not content and (attacks or self.rng.random() < CORRECTS):
            done = self.rng.choice([*REQUESTS]) if attacks else self.kind
            said["correction"] = json.dumps(first_answer(self.kind, done, self.order))
        await post("/feedback", said)


async def post(path: str, body: dict[str, Any]) -> None:
    headers = {TOKEN: tokens.get(body["session"], "")}
    found = await client().post(os.environ["OPENAI_BASE_URL"] + path, json=body, headers=headers)
    found.raise_for_status()


async def keep_token(response: httpx.Response) -> None:
    if TOKEN in response.headers:
        tokens[response.request.headers["x-session-id"]] = response.headers[TOKEN]


async def come(options: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Play sessions that begin `per_second` on average; yields what each was like, in the order of
    their ends."""
    client().event_hooks["response"] = [keep_token]
    playing, pauses = set[asyncio.Task[dict[str, Any]]](), random.Random(options.seed)
    for number in range(options.first, options.first + options.sessions):
        playing.add(asyncio.create_task(Session(number, options).play()))
        pause = asyncio.create_task(asyncio.sleep(pauses.expovariate(options.per_second)))
        while not pause.done() or len(playing) >= AT_ONCE:
            awaited = playing if pause.done() else {pause, *playing}
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in done & playing:
                playing.remove(task)
                yield task.result()
    for task in asyncio.as_completed(playing):
        yield await task


def options(given: list[str] | None = None) -> argparse.Namespace:
    """Of the command, or of these words."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--sessions", type=int, default=1500)
    add("--first", type=int, default=0, help="number of the first session")
    add("--seed", type=int, default=0)
    add("--per-second", type=float, default=4.0, help="sessions that begin")
    add("--attack", type=float, default=0.05, help="share of the attacker's sessions")
    add("--votes", type=float, default=0.2, help="share of the other sessions in which they vote")
    add("--leave-open", action="store_true", help="for a server that ends idle sessions itself")
    return parser.parse_args(given)


async def main() -> None:
    async for played in come(options()):
        print(json.dumps(played), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
