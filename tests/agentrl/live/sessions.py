"""Sessions of a live run in a store, as a gateway writes them, without one."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from typing import Any

from agentrl.core.types import SESSION, NewRollout, Outcome, Rollout, Transition, float32, int32
from agentrl.live.labels import Asker
from agentrl.runners.feedback import session_group
from agentrl.store.base import Store

RUN = "shop"
NOW = 1_700_000_000.0  # unix seconds, 22:13 UTC
numbers = itertools.count()


async def ended(
    store: Store,
    name: str,
    *texts: str,
    user: str = "",
    at: float = NOW,
    run: str = RUN,
    running: bool = False,
    **task: Any,
) -> str:
    """A session of a conversation that ended, or is `running`; texts: of user and agent in turn.
    Returns its rollout."""
    group = session_group(run, name)
    rollout = NewRollout(
        id=f"{group}/{next(numbers)}", run=run, group=group, index=0, step=SESSION,
        task={"user": user, "version": 1, "lane": "serving", **task}, priority=1,
    )  # fmt: skip
    await store.enqueue([rollout])
    (attempt,) = await store.claim(1, runner=uuid.uuid4().hex, lease=60.0, run=run)
    await store.add_transitions(calls_of(attempt.id, texts or ("hi", "echo hi")))
    if running:
        return rollout.id
    outcome = Outcome(attempt=attempt.id, fence=attempt.fence, result={"ended": at})
    await store.finish([outcome])
    return rollout.id


def calls_of(attempt: str, texts: Sequence[str]) -> list[Transition]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [
        Transition(
            id=uuid.uuid4().hex, attempt=attempt, index=i // 2, prompt=int32([1, 2, 3]),
            completion=int32([4]), logprobs=float32([-0.5]), messages=said[:i], answer=said[i],
        )
        for i in range(1, len(said), 2)
    ]  # fmt: skip


async def row_of(store: Store, rollout: str, run: str = RUN) -> Rollout:
    (found,) = [row for row in await store.rollouts(run) if row.id == rollout]
    return found


class Scripted(Asker):
    """Answers at once: the verifier by the last answer, the judge by the next message."""

    def __init__(self, **verified: float) -> None:
        self.verified, self.asked = verified, list[str]()

    async def verify(self, trace):  # type: ignore[no-untyped-def]
        self.asked.append(trace.rollout.id)
        last = trace.transitions[-1].answer["content"]
        found = [value for word, value in self.verified.items() if word in last]
        return {"verifier": found[0]} if found else {}

    async def judge(self, replies, subject):  # type: ignore[no-untyped-def]
        words = {"thanks": 1.0, "no!": 0.0}
        found = {reply.call: words.get(reply.next[-1]["content"]) for reply in replies}
        return {call: value for call, value in found.items() if value is not None}
