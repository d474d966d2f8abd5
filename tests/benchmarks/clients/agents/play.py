"""What the programs share: the tool, and a loop over the conversations of a task.

A program gives `play` its function (questions, streamed) -> None, which asks the questions in one
conversation, as the client's own guides show it."""

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path

ROOT = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")  # for clients that add the version
KEY = os.environ["OPENAI_API_KEY"]
os.environ.update(GEMINI_API_KEY=KEY, GOOGLE_GEMINI_BASE_URL=ROOT)
ARGUMENT = sys.argv[1] if len(sys.argv) > 1 else ""
SYSTEM = "Add with the tool."
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "description": "one number"},
        "b": {"type": "integer", "description": "another"},
        "note": {"type": "string", "description": "what it is for"},
    },
    "required": ["a", "b"],
}


def add(a: int, b: int, note: str = "") -> str:
    """Add two numbers.

    Args:
        a: one number
        b: another
        note: what it is for
    """
    return str(a + b)


def called(text):
    """The result of a call with the arguments `text`, for clients that have no loop."""
    try:
        return add(**(json.loads(text) if isinstance(text, str) else text))
    except (ValueError, TypeError) as error:
        return f"Error: {error}"


def play(talk):
    """Run the conversations of the task. An error ends its conversation only."""
    task = json.loads(os.environ["AGENTRL_TASK"])

    async def all_of_them():
        outcomes = {}
        for case, questions in task["cases"].items():
            try:
                if inspect.iscoroutinefunction(talk):
                    await talk(questions, task["streamed"])
                else:
                    await asyncio.to_thread(talk, questions, task["streamed"])
                outcomes[case] = ""
            except Exception as error:  # noqa: BLE001 - whatever a client raises
                outcomes[case] = f"{type(error).__name__}: {error}"[:600]
        return outcomes

    outcomes = asyncio.run(all_of_them())
    Path(os.environ["AGENTRL_RESULT_FILE"]).write_text(json.dumps(outcomes))
    sys.stdout.flush()
    os._exit(0)  # some leave threads behind
