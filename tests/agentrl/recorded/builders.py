"""Traces for tests: rows as LangSmith writes them, and imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.core.types import Trace
from agentrl.recorded.importing import RUN, Imported, import_traces
from agentrl.store import open_store

Row = dict[str, Any]


def run(id: str, kind: str, parent: str = "", **more: Any) -> Row:
    trace = id.split(".")[0]
    about = {"id": id, "trace_id": trace, "run_type": kind, "name": id, "error": None}
    return about | {"parent_run_id": parent or None, **more}


def llm(id: str, role: str, asked: list[Row], said: Row, **more: Any) -> Row:
    answer = {"choices": [{"message": {"role": "assistant", **said}, "finish_reason": "stop"}]}
    extra = {"metadata": {"langgraph_node": role, "ls_model_name": "big"}}
    given = {"inputs": {"messages": asked}, "outputs": answer, "extra": extra}
    return run(id, "llm", id.split(".")[0], **given | more)


def user(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def question(number: int, text: str, answer: str, *, score: float | None = None) -> list[Row]:
    """A trace of two roles, which starts at second `number`."""
    id, at = f"t{number}", f"2026-01-01T00:{number:02d}:00Z"
    rows = [
        run(id, "chain", inputs={"input": text}, outputs={"output": answer}, start_time=at),
        llm(f"{id}.1", "planner", user(text), {"content": "look"}, start_time=at),
        llm(f"{id}.2", "writer", user(f"look {text}"), {"content": answer}, start_time=at),
    ]
    if score is not None:
        rows.append({"key": "correct", "run_id": id, "score": score})
    return rows


def write(path: Path, *traces: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for rows in traces for row in rows))
    return path


async def imported(source: Path, out: Path) -> tuple[Imported, list[Trace]]:
    """What an import into a new or older store of a folder has done, and the stored traces."""
    url = f"sqlite:///{out}/traces.db"
    done = await import_traces(source, url)
    async with open_store(url, readonly=True) as store:
        found = [await store.trace(row.id) for row in await store.rollouts(RUN)]
    return done, sorted((t for t in found if t), key=lambda trace: str(trace.rollout.task))
