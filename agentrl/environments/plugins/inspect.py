"""Inspect's tasks. Each sample of an Inspect task is a task of the run.

WHAT is a task, such as `inspect_evals/gsm8k` or `prices.py@prices`. Other models that a task calls,
such as `grader`, are roles.
"""

from __future__ import annotations

from copy import copy
from tempfile import TemporaryDirectory
from typing import Any

from agentrl.core.types import Json
from agentrl.environments import Endpoint, Environment
from agentrl.environments.plugins.verdicts import (
    check_choice,
    digest,
    held_out,
    no_timeouts,
    numbered,
    scores,
)

# Unset, so that the run's sampling settings apply.
SAMPLING = dict.fromkeys(("temperature", "top_p", "top_k", "seed", "num_choices"))
GRADER = 'it asks the role grader: set environment_options.roles = ["grader"]'


class Inspect(Environment):
    requires = ("inspect-ai==0.3.285", "inspect-evals==0.26.0", "openai==3.57.0")
    isolation = "process"  # Inspect runs one evaluation at a time

    def __init__(self, what: str, score: str = "", roles: Any = (), messages: int = 100,
                 **arguments: Any) -> None:  # fmt: skip
        """`score`: the score to use as reward, if there are several. `roles`: roles that cannot be
        derived from the task. `messages`: maximum number of messages."""
        from inspect_ai._eval.loader import load_tasks
        from inspect_ai._util.registry import registry_info, registry_params
        from inspect_ai.util._display import init_display_type

        init_display_type("none")
        [self.task] = load_tasks([str(self.root / what) if ".py" in what else what], arguments)
        self.task.model, self.task.message_limit = None, self.task.message_limit or messages
        self.task.config = self.task.config.model_copy(update=SAMPLING)
        scorers = [(registry_info(s).name.split("/")[-1], s) for s in self.task.scorer or ()]
        names = numbered([name for name, _ in scorers])
        check_choice(names, score)
        with_params = [(name, registry_params(scorer)) for name, scorer in scorers]
        judged = [p for n, p in with_params if "model_graded" in n and not p.get("model")]
        seen = [*(p.get("model_role", "grader") for p in judged), *(self.task.model_roles or ())]
        self.what, self.score, self.roles = what, score, tuple(sorted({*roles, *seen}))
        self.pairs = [(i if x.id is None else x.id, x) for i, x in enumerate(self.task.dataset, 1)]

    def tasks(self, split: str) -> list[dict[str, Json]]:
        samples = [self.pairs[i] for i in held_out(len(self.pairs), split)]
        return [
            {"id": f"{self.what}/{id}", "input": id, "question": digest(sample.input)}
            for id, sample in samples
        ]

    def solution(self, id: str | int) -> list[str]:
        target = dict(self.pairs)[id].target
        return [f"ANSWER: {target if isinstance(target, str) else target[0]}"]

    async def run(self, id: str | int, endpoint: Endpoint) -> dict[str, float]:
        from inspect_ai import eval_async, task_with
        from inspect_ai.dataset import MemoryDataset
        from inspect_ai.model import get_model

        def model(at: Endpoint) -> Any:  # Inspect's client of the Responses API would send a probe
            client = {"base_url": at.url, "api_key": at.key, "responses_api": False}
            return get_model(f"openai/{at.model}", memoize=False, **client)

        roles = {"grader": get_model("none/none")}  # otherwise the policy would grade itself
        roles |= {role: model(endpoint.role(role)) for role in self.roles}
        task = task_with(copy(self.task), dataset=MemoryDataset([dict(self.pairs)[id]]))
        play = {"model": model(endpoint), "model_roles": roles, "epochs": 1, "max_retries": 2}
        with TemporaryDirectory() as logs, no_timeouts():
            [log] = await eval_async(task, fail_on_error=False, log_dir=logs, **play)
            [sample] = log.samples or [None]  # read from the folder
        if error := log.error or (sample and sample.error):
            raise RuntimeError(GRADER if "No model specified" in error.message else error.message)
        limit = sample and sample.limit and sample.limit.type
        if limit in ("time", "working"):
            raise RuntimeError(f"the sample ran into the task's {limit} limit")
        return scores((sample and sample.scores) or {}, self.score)
