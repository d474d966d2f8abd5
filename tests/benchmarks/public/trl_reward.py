"""The reward that agentrl's plug-in gives a reply to a task of reasoning-gym, for a Python without
agentrl."""

from __future__ import annotations

from ast import literal_eval
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer


@cache
def scorer(name: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=0, size=1).score_answer


def verify(task: dict[str, Any], reply: str) -> float:
    entry = literal_eval(task["entry"])
    score = scorer(entry["metadata"]["source_dataset"])
    return float(score(extract_answer(reply) or reply.strip(), entry))
