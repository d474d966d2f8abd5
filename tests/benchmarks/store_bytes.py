"""Bytes per call in the store file, at 5, 20 and 50 turns of one conversation.

Own size of a call: its new prompt tokens (4 bytes), its completion tokens and log-probs (4 + 4),
and the text of the messages that are new. Constant: what a call costs apart from that (its row,
its indexes, its share of the attempt), measured with calls of one token and no text. The ratio that
counts is (bytes - constant) / own size. Baseline: `sqlite3` with every prompt and every
conversation stored in full.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agentrl.core.types import Transition, float32, int32
from agentrl.store import open_store
from tests.benchmarks import store_load as load
from tests.benchmarks.store import Figures

TURNS = (5, 20, 50)
ATTEMPTS = 40
FIRST, COMPLETION, TOOL = 256, 128, 128  # tokens


def measure(quick: bool) -> Figures:
    attempts = 4 if quick else ATTEMPTS
    figures: Figures = {}
    for turns in TURNS:
        constant = stored(attempts, turns, text=False, tokens=1) / (attempts * turns)
        for text in (False, True):
            name = f"{turns}_turns{'_with_text' if text else ''}"
            calls = attempts * turns
            size = stored(attempts, turns, text=text) / calls
            own = own_size(turns, text=text) / turns
            figures |= {
                f"bytes_per_call_{name}": size,
                f"own_bytes_per_call_{name}": own,
                f"ratio_{name}": (size - constant) / own,
                f"full_prompts_to_stored_{name}": in_full(attempts, turns, text=text)
                / calls
                / size,
            }
        figures[f"constant_{turns}_turns"] = constant
    return figures


def conversation(
    attempt: str, turns: int, *, text: bool, tokens: int | None = None
) -> Iterator[Transition]:
    """The agent asks, the model answers, a tool answers, and all of it is sent again."""
    first, completion, tool = (tokens or n for n in (FIRST, COMPLETION, TOOL))
    prompt = list(range(first))
    messages = [{"role": "user", "content": load.text(first)}] if text else []
    for index in range(turns):
        answer = {"role": "assistant", "content": f"{index} {load.text(completion)}"}
        made = [1000 * index + i for i in range(completion)]
        yield Transition(
            id=f"{attempt[:24]}{index:08x}",
            attempt=attempt,
            index=index,
            prompt=int32(prompt),
            completion=int32(made),
            logprobs=float32([-0.25] * completion),
            messages=messages,
            answer=answer if text else None,
        )
        prompt = [*prompt, *made, *range(tool)]
        if text:
            messages = [*messages, answer, {"role": "tool", "content": load.text(tool)}]


def own_size(turns: int, *, text: bool) -> int:
    size, prompt, messages = 0, 0, 0
    for call in conversation("", turns, text=text):
        size += 4 * (len(call.prompt) - prompt) + 8 * len(call.completion)
        new = [*call.messages[messages:], *([call.answer] if call.answer else [])]
        size += sum(len(json.dumps(message)) for message in new)
        prompt = len(call.prompt) + len(call.completion)
        messages = len(call.messages) + 1
    return size


def stored(attempts: int, turns: int, *, text: bool, tokens: int | None = None) -> int:
    """What the conversations add to the file."""

    async def run(path: str) -> int:
        async with open_store(path) as store:
            await store.open_run("run", {})
            await store.enqueue(load.rollouts("bench", attempts))
            claimed = await store.claim(attempts, runner="bench", lease=3600)
        before = used(path)
        async with open_store(path) as store:
            for one in claimed:
                for call in conversation(one.id, turns, text=text, tokens=tokens):
                    await store.add_transitions([call])
        return used(path) - before

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(str(Path(folder) / "store.db")))


def in_full(attempts: int, turns: int, *, text: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "full.db")
        conn = sqlite3.connect(path)
        conn.execute("create table calls (prompt blob, completion blob, logprobs blob, chat text)")
        for _ in range(attempts):
            conn.executemany(
                "insert into calls values (?, ?, ?, ?)",
                [
                    (
                        call.prompt.tobytes(),
                        call.completion.tobytes(),
                        call.logprobs.tobytes(),
                        json.dumps([call.messages, call.answer]),
                    )
                    for call in conversation("", turns, text=text)
                ],
            )
        conn.commit()
        conn.close()
        return used(path)


def used(path: str) -> int:
    """Bytes of the file that hold something."""
    conn = sqlite3.connect(path)
    conn.execute("pragma wal_checkpoint(truncate)")
    pages, free, size = (
        conn.execute(f"pragma {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    conn.close()
    return int((pages - free) * size)
