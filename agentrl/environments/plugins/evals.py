"""OpenAI evals. WHAT is an eval of the registry, such as `test-match.s1.simple-v0`; its own class
asks and scores, one sample a rollout. Those that a model grades ask the role `grader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from types import SimpleNamespace
from typing import Any

from agentrl.environments import Endpoint, Environment
from agentrl.environments.plugins.shared import held_out, some_key
from agentrl.environments.toolbox import number
from agentrl.types import Json

STATE_THEIR_ANSWER = {"Match", "Includes", "FuzzyMatch", "JsonMatch"}
# The package asks for 45 others; its usual classes import these.
NEEDED = """backoff==2.2.1 beartype==0.23.1 blobfile==3.3.0 lz4==4.4.5 numpy==2.4.6 openai==3.57.0
pandas==3.1.1 pydantic==2.14.4 pyyaml==6.0.4 requests==2.34.2 sacrebleu==2.6.0 tiktoken==0.14.0
tqdm==4.70.1 zstandard==0.25.0"""


class Evals(Environment):
    requires = ("--no-deps evals==3.0.1.post1", *NEEDED.split())

    def __init__(self, what: str, **arguments: Any) -> None:
        """`arguments`: of the eval's class, in place of the registry's."""
        with some_key():
            from evals.registry import registry
        if (spec := registry.get_eval(what)) is None:
            raise ValueError(f"the registry of OpenAI evals has no {what!r}")
        given = {"eval_registry_path": spec.registry_path, "registry": registry, "name": spec.key}
        given |= {"seed": 20220722, **(spec.args or {}), **arguments}
        made, self.name = registry.get_class(spec).func, spec.key
        self.kind, solvers = made.__name__, any(c.__name__ == "SolverEval" for c in made.__mro__)
        if solvers:
            raise ValueError(f"{what} works with solvers of the package only, which call no policy")
        self.eval: Any = lambda *players: made(completion_fns=[*map(completion, players)], **given)
        self.roles = ("grader",) if self.kind == "ModelBasedClassify" else ()
        self.samples = self.eval(None).get_samples()

    def tasks(self, split: str) -> Iterator[dict[str, Json]]:
        for i in held_out(len(self.samples), split):
            yield {"id": f"{self.name}/{i}", "input": i}

    def solution(self, index: int) -> list[str] | None:
        ideal = self.samples[index]["ideal"] if self.kind in STATE_THEIR_ANSWER else []
        return [ideal] if isinstance(ideal, str) else ideal[:1] or None

    def run(self, index: int, endpoint: Endpoint) -> dict[str, float]:
        from evals import record

        kept: dict[str, Any] = {}  # of what the eval records

        def matched(correct: bool, **_: Any) -> None:
            kept["outcome"] = number(correct)

        recorder = SimpleNamespace(record_match=matched, record_metrics=kept.update)
        record._default_recorder.set(recorder)  # of this thread's context
        played = self.eval(endpoint, *map(endpoint.role, self.roles))
        rng = Random(f"{self.name}.{index}:{played.seed}".encode())  # as the package's
        played.eval_sample(deepcopy(self.samples[index]), rng)
        kept["outcome"] = number(kept.get("outcome", kept.get("score")))  # None if it has neither
        return {k: float(v) for k, v in kept.items() if isinstance(v, int | float)}


def completion(endpoint: Endpoint | None) -> Callable[..., Any]:
    """How an eval calls a model: with the run file's [sampling], not with what it fixes itself,
    such as temperature 0."""

    def complete(prompt: str | list[dict[str, Any]], **_: Any) -> Any:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = endpoint and endpoint.chat_sync(messages)["content"]
        return SimpleNamespace(get_completions=lambda: [said])

    return complete
