"""Inspect. WHAT is a task, such as `inspect_evals/gsm8k` or `prices.py@prices`; one sample is one
rollout. Other models that it asks, such as `grader`, are roles."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from tempfile import TemporaryDirectory
from typing import Any

from agentrl.environments import Endpoint, Environment
from agentrl.environments.plugins.shared import held_out
from agentrl.types import Json

SAMPLING = dict.fromkeys(("temperature", "top_p", "top_k", "seed", "num_choices"))  # the run's
VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
SAMPLES = "inspect_ai._eval.task.run"  # logger of what plays samples
GRADER = 'it asks the role grader: set environment_options.roles = ["grader"]'


class Inspect(Environment):
    requires = ("inspect-ai==0.3.285", "inspect-evals==0.26.0", "openai==3.57.0")
    isolation = "process"  # it runs one evaluation at a time

    def __init__(self, what: str, score: str = "", roles: Any = (), messages: int = 100,
                 **arguments: Any) -> None:  # fmt: skip
        """`score`: of several, what counts. `roles`: not seen in it. `messages`: the most."""
        from inspect_ai._eval.loader import load_tasks
        from inspect_ai._util.registry import registry_info, registry_params
        from inspect_ai.util._display import init_display_type

        init_display_type("none")
        [self.task] = load_tasks([str(self.root / what) if ".py" in what else what], arguments)
        self.task.model, self.task.message_limit = None, self.task.message_limit or messages
        self.task.config = self.task.config.model_copy(update=SAMPLING)
        scorers = [(registry_info(s).name.split("/")[-1], s) for s in self.task.scorer or ()]
        names = numbered([name for name, _ in scorers])
        if not names:
            raise ValueError("the task has no scorer, so nothing would be learned from it")
        if len(names) > 1 and not score:
            raise ValueError(f"set environment_options.score to one of its scores: {names}")
        if score and score.partition("/")[0] not in names:
            raise ValueError(f"environment_options.score = {score!r}: it has the scores {names}")
        known = [(name, registry_params(scorer)) for name, scorer in scorers]
        judged = [p for n, p in known if "model_graded" in n and not p.get("model")]
        seen = [*(p.get("model_role", "grader") for p in judged), *(self.task.model_roles or ())]
        self.what, self.score, self.roles = what, score, tuple(sorted({*roles, *seen}))
        self.pairs = [(i if x.id is None else x.id, x) for i, x in enumerate(self.task.dataset, 1)]

    def tasks(self, split: str) -> list[dict[str, Json]]:
        ids = [self.pairs[i][0] for i in held_out(len(self.pairs), split)]
        return [{"id": f"{self.what}/{id}", "input": id} for id in ids]

    def solution(self, id: str | int) -> list[str]:
        target = dict(self.pairs)[id].target
        return [f"ANSWER: {target if isinstance(target, str) else target[0]}"]

    async def run(self, id: str | int, endpoint: Endpoint) -> dict[str, float]:
        from inspect_ai import eval_async, task_with
        from inspect_ai.dataset import MemoryDataset
        from inspect_ai.model import get_model

        def model(at: Endpoint) -> Any:  # its Responses API would first send a probe
            given = {"base_url": at.url, "api_key": at.key, "responses_api": False}
            return get_model(f"openai/{at.model}", memoize=False, **given)

        roles = {"grader": get_model("none/none")}  # else the policy would grade itself
        roles |= {role: model(endpoint.role(role)) for role in self.roles}
        task = task_with(copy(self.task), dataset=MemoryDataset([dict(self.pairs)[id]]))
        play = {"model": model(endpoint), "model_roles": roles, "epochs": 1, "max_retries": 2}
        with TemporaryDirectory() as logs, unexpected_timeouts() as late:
            [log] = await eval_async(task, fail_on_error=False, log_dir=logs, **play)
            [sample] = log.samples or [None]  # read from the folder
        if late:
            raise RuntimeError("a solver or tool ran out of time (TimeoutError)")
        if error := log.error or (sample and sample.error):
            raise RuntimeError(GRADER if "No model specified" in error.message else error.message)
        limit = sample and sample.limit and sample.limit.type
        if limit in ("time", "working"):
            raise RuntimeError(f"the sample ran into the task's {limit} limit")
        return scores((sample and sample.scores) or {}, self.score)


@contextmanager
def unexpected_timeouts() -> Iterator[list[str]]:
    """What Inspect logs of a TimeoutError of a solver or tool, after which it goes on to score."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "timeout error" in record.getMessage():
                found.append(record.getMessage())

    logger, handler = logging.getLogger(SAMPLES), Kept(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def numbered(names: list[str]) -> list[str]:
    """Names as Inspect writes them into its log: the second of a name ends in 1."""
    found: list[str] = []
    for name in names:
        count = sum(other == name for other in names[: len(found)])
        found.append(f"{name}{count}" if count else name)
    return found


def scores(given: dict[str, Any], score: str) -> dict[str, float]:
    """All scores of a sample as numbers, and the one named `score`, or the only one, as the
    outcome. Raises RuntimeError if it is not clear which one counts."""
    found: dict[str, float] = {}
    for scorer, row in given.items():
        rows = row.value if isinstance(row.value, dict) else {"": row.value}
        for key, value in rows.items():
            name = f"{scorer}/{key}".rstrip("/")
            found[name] = number(value, name)
    if not found:
        raise RuntimeError("no scorer gave a score")
    if score not in found and (score or len(found) > 1):
        wanted = [name for name in found if name.partition("/")[0] == score] or [*found]
        if score and len(wanted) == 1:
            return found | {"outcome": found[wanted[0]]}
        raise RuntimeError(f"set environment_options.score to one of its scores: {wanted}")
    return found | {"outcome": found[score or next(iter(found))]}


def number(value: Any, name: str) -> float:
    """A score as Inspect reads it, but for what it would read as 0 with a warning."""
    if isinstance(value, str):
        if (word := VALUES.get(value, WORDS.get(value.lower()))) is not None:
            return word
        try:
            return float(value)
        except ValueError:
            raise RuntimeError(f"the score {name} is {value!r:.80}, which is no number") from None
    if not isinstance(value, int | float):
        raise RuntimeError(f"the score {name} is {value!r:.80}, which is no number")
    return float(value)
