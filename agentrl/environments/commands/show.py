"""`agentrl env show`: tasks, and a rollout that is played in the terminal."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import click
import msgspec

from agentrl.base import threads
from agentrl.config.derived import Named
from agentrl.environments import hosted
from agentrl.environments.scripted import Message, Played, Reply, stage
from agentrl.errors import ConfigError, nearest
from agentrl.types import Json

SHOWN = 5  # tasks
LONGEST = 300  # characters of an input
BY_HAND = 24 * 3600.0  # seconds of a rollout


def print_tasks(named: Named, split: str, id: str | None) -> dict[str, Json]:
    """Print what the environment has; return the task to play. Raises ConfigError."""
    about = hosted.describe(named)
    where = f"in processes of {named.python}" if named.python else "in this interpreter"
    roles = f", asks {', '.join(about.roles)}" if about.roles else ""
    click.echo(f"{named.name}: {about.kind}{roles}, {where}")
    rows = {name: hosted.tasks(named, name) for name in ("train", "heldout")}
    click.echo(", ".join(f"{len(found)} tasks of {name}" for name, found in rows.items()))
    for row in rows[split][:SHOWN]:
        click.echo(f"  {row['id']}  {_short(row['input'])}")
    found = [row for row in rows[split] if id in (None, row["id"])]
    if not found:
        known = nearest(str(id), (str(row["id"]) for row in rows[split][:100]))
        raise ConfigError(f"{named.name} has no task {id!r} of {split}; {known}")
    return found[0]


async def play_by_hand(named: Named, task: dict[str, Json]) -> None:
    """Raises click.Abort at the end of the input."""
    left = asyncio.Event()
    async with stage(named, BY_HAND) as on:
        click.echo(f"\ntask {task['id']}")
        playing = asyncio.create_task(on.play(task, _hand(left)))
        leaving = asyncio.create_task(left.wait())
        await asyncio.wait({playing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if left.is_set():
            playing.cancel()
            raise click.Abort
        told(playing.result())


def told(played: Played) -> None:
    """Print how a rollout ended."""
    if played.problem:
        click.echo(f"\nfailed: {played.problem}")
        return
    scores = ", ".join(f"{name} {value:g}" for name, value in played.rewards.items())
    steps = f"; rewards of steps: {', '.join(f'{value:g}' for value in played.steps)}"
    click.echo(
        f"\n{scores or 'no reward'} after {len(played.calls)} calls" + steps * bool(played.steps)
    )


def _hand(left: asyncio.Event) -> Reply:
    """Asks the terminal, and prints what was said since the role's last answer. Sets `left` at the
    end of the input."""
    seen: dict[str, int] = {}
    turn = asyncio.Lock()

    async def reply(role: str, messages: list[Message], tools: list[Any]) -> Message:
        async with turn:
            known = seen.get(role, 0)
            for message in messages[known if known < len(messages) else 0 :]:
                if message.get("role") != "assistant" or not known:
                    click.echo(f"\n{message.get('role')}: {_text(message)}")
            if tools and not known:
                names = (one.get("function", one).get("name") for one in tools)
                click.echo(f"tools: {', '.join(map(str, names))}  (/call NAME {{...}})")
            seen[role] = len(messages)
            ask = partial(
                click.prompt, f"{role}>", default="", show_default=False, prompt_suffix=" "
            )
            while True:
                try:
                    line = await threads.call(ask)
                except click.Abort:
                    left.set()
                    await asyncio.Event().wait()  # until the rollout is cancelled
                try:
                    return message_of(line)
                except ValueError as error:
                    click.echo(f"{error}")

    return reply


def message_of(line: str) -> Message:
    """The assistant's message that a line means. Raises ValueError with a sentence."""
    if line.startswith("/call "):
        name, _, arguments = line.removeprefix("/call ").strip().partition(" ")
        arguments = arguments.strip() or "{}"
        _object(arguments)
        function = {"name": name, "arguments": arguments}
        call = {"id": "call_by_hand", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if line.startswith('{"role"'):
        return _object(line)
    return {"role": "assistant", "content": line}


def _object(text: str) -> dict[str, Json]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{text} is not a JSON object: {error}") from None


def _text(message: Message) -> str:
    calls = message.get("tool_calls")
    content = message.get("content")
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return f"{text} {msgspec.json.encode(calls).decode()}" if calls else text


def _short(given: Json) -> str:
    text = " ".join(
        (given if isinstance(given, str) else msgspec.json.encode(given).decode()).split()
    )
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
