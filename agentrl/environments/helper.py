"""The helper process of an environment, in its own interpreter: it answers one request per line."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from contextlib import nullcontext
from typing import Any

import msgspec

from agentrl.core.errors import AgentRLError
from agentrl.core.user_code import contained, text_of
from agentrl.environments.hosted import (
    HelperAnswer,
    Request,
    about,
    checked_tasks,
    explained,
    made,
    verified,
)
from agentrl.runners.tracing import core as tracing


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the environment's output must not mix with answers
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        answers.write(msgspec.json.encode(answer(requests.get())) + b"\n")
        answers.flush()


def _read(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def answer(line: bytes) -> HelperAnswer:
    try:
        with contained():
            return HelperAnswer(_done(msgspec.json.decode(line, type=Request)))
    except AgentRLError as error:
        return HelperAnswer(problem=str(error))
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
        return HelperAnswer(problem=text_of(error))


def _done(request: Request) -> Any:
    named = request.named
    if request.do == "describe":
        return about(named)
    if request.do == "tasks":
        return checked_tasks(named, str(request.given))
    if request.do == "solution":
        with explained(named, "raised in solution"):
            return made(named).solution(request.given)
    task: Any = request.given
    # An audit and `agentrl rescore` score results outside of any attempt.
    traced = tracing.install().attempt(request.attempt) if request.attempt else nullcontext()
    with traced:
        return msgspec.to_builtins(asyncio.run(verified(named, task, request.result)))


if __name__ == "__main__":
    main()
