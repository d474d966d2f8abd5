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
from orders import ORDERS, answer
from policy import first_answer
from wording import COMPLAINTS, REQUESTS, THANKS, kind_of, request, request_again

TOOL = {"where": "look_up_order", "return": "start_return"}
CUSTOMERS = 400
VOTES, CORRECTS = 0.2, 0.5  # share of sessions, and of the wrong ones among those
AT_ONCE = 16  # sessions, at most: then customers wait
TOKEN = "x-agentrl-feedback-token"
tokens: dict[str, str] = {}  # by session, as a web application would keep them


class Session:
    """A customer's conversation. seed, number: decide all that the customer does."""

    def __init__(self, seed: int, number: int, attack: float) -> None:
        self.rng = random.Random(f"{seed}/{number}")
        self.id, self.messages = f"{seed}-{number}", list[Any]()
        self.kind, self.order = kind_of(self.rng), self.rng.choice(ORDERS)
        self.nature = self.rng.choices(["patient", "rude", "mistaken"], [0.6, 0.25, 0.15])[0]
        self.customer = f"customer-{self.rng.randrange(CUSTOMERS)}"
        if self.rng.random() < attack:
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
        self.messages = (await support(self.id, self.customer).ainvoke(said))["messages"]
        new = self.messages[known:]
        used = [(call["name"], call["args"]) for m in new for call in getattr(m, "tool_calls", ())]
        wanted = [(TOOL[self.kind], {"order": self.order})] if self.kind in TOOL else []
        return used == wanted and new[-1].text.endswith(answer(self.kind, self.order))

    async def vote(self, content: bool) -> None:
        attacks = self.nature == "attacker"
        if self.rng.random() >= (1 if attacks else VOTES):
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


async def come(
    sessions: int, seed: int, per_second: float, attack: float
) -> AsyncIterator[dict[str, Any]]:
    """Play sessions that begin `per_second` on average; yields what each was like, in the order of
    their ends."""
    client().event_hooks["response"] = [keep_token]
    playing, pauses = set[asyncio.Task[dict[str, Any]]](), random.Random(seed)
    for number in range(sessions):
        session = Session(seed, number, attack)
        playing.add(asyncio.create_task(session.play()))
        pause = asyncio.create_task(asyncio.sleep(pauses.expovariate(per_second)))
        while not pause.done() or len(playing) >= AT_ONCE:
            awaited = playing if pause.done() else {pause, *playing}
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in done & playing:
                playing.remove(task)
                yield task.result()
    for task in asyncio.as_completed(playing):
        yield await task


async def main(arguments: argparse.Namespace) -> None:
    async for played in come(**vars(arguments)):
        print(json.dumps(played), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-second", type=float, default=4.0, help="sessions that begin")
    parser.add_argument(
        "--attack", type=float, default=0.05, help="share of the attacker's sessions"
    )
    asyncio.run(main(parser.parse_args()))
