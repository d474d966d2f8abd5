"""What each grader or environment does, by its own package: `python -m
tests.benchmarks.graders.checks NAME`, in the interpreter that has the packages of that plug-in,
prints the versions and what each check of it found, as one line of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[3]
Check = Callable[[], Any]
CHECKS: dict[str, dict[str, Check]] = {}
# Packages whose versions the page has, by plug-in.
PACKAGES = {
    "bfcl": ["bfcl-eval"], "gymnasium": ["gymnasium"], "inspect": ["inspect-ai"],
    "openai-evals": ["evals"],
    "pettingzoo": ["pettingzoo"], "reasoning-gym": ["reasoning-gym"], "textarena": ["textarena"],
    "verifiers": ["verifiers", "math-verify", "datasets"], "verifiers-v1": ["verifiers"],
}  # fmt: skip


def check(plugin: str) -> Callable[[Check], Check]:
    def kept(function: Check) -> Check:
        CHECKS.setdefault(plugin, {})[function.__name__] = function
        return function

    return kept


def raised(function: Callable[..., Any], *given: Any) -> str:
    """The name of what a call raises, or "nothing"."""
    try:
        function(*given)
    except Exception as error:  # noqa: BLE001 - what is asked
        return type(error).__name__
    return "nothing"


# -- Inspect ---------------------------------------------------------------------------------------


def sample_of(values: Any, error: Exception | None = None, scorers: int = 1) -> list[Any]:
    """Whether Inspect's sample has an error, and its scores, for a solver that raises `error`, and
    scorers that give `values`."""
    ai, data = import_module("inspect_ai"), import_module("inspect_ai.dataset")
    of, solvers = import_module("inspect_ai.scorer"), import_module("inspect_ai.solver")

    @of.scorer(metrics=[of.accuracy()])
    def right() -> Any:
        async def score(state: Any, target: Any) -> Any:
            if isinstance(values, Exception):
                raise values
            return None if values is None else of.Score(value=values)

        return score

    @solvers.solver
    def played() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            if error is not None:
                raise error
            return state

        return solve

    known = [right() for _ in range(scorers)] or None
    task = ai.Task(dataset=data.MemoryDataset([data.Sample(input="x", target="x")]),
                   solver=played(), scorer=known)  # fmt: skip
    with tempfile.TemporaryDirectory() as logs:
        given: dict[str, Any] = {"model": "mockllm/model", "display": "none", "log_dir": logs}
        [log] = ai.eval(task, fail_on_error=False, **given)
        [sample] = log.samples
    scores = {name: score.value for name, score in (sample.scores or {}).items()}
    found = log.results.scores if log.results else []
    metrics = [metric.value for score in found for metric in score.metrics.values()]
    return [bool(sample.error), scores, metrics]


@check("inspect")
def solver_times_out() -> Any:
    return sample_of(1.0, TimeoutError("no answer"))[:2]


@check("inspect")
def solver_raises() -> Any:
    return sample_of(1.0, RuntimeError("broken"))[:2]


@check("inspect")
def scorer_raises() -> Any:
    return sample_of(RuntimeError("broken"))[:2]


@check("inspect")
def scorer_times_out() -> Any:
    return sample_of(TimeoutError("no answer"))[:2]


@check("inspect")
def dictionary() -> Any:
    return sample_of({"format": 1, "correct": 0})[:2]


@check("inspect")
def two_of_one_name() -> Any:
    return [*sample_of(1.0, scorers=2)[1]]


@check("inspect")
def no_scorer() -> Any:
    return sample_of(1.0, scorers=0)[:2]


@check("inspect")
def scorer_gives_none() -> Any:
    return sample_of(None)[:2]


@check("inspect")
def scorer_gives_true_text() -> Any:
    return sample_of("True")[2]


@check("inspect")
def scorer_gives_half_text() -> Any:
    return sample_of("0.5")[2]


@check("inspect")
def scorer_gives_other_text() -> Any:
    return sample_of("well done")[2]


@check("inspect")
def scorer_gives_nan() -> Any:
    return [str(x) for x in sample_of(math.nan)[2]]


# -- verifiers up to 0.3, math-verify and datasets, which it brings --------------------------------


def rubric_gives(function: Any) -> float:
    vf: Any = import_module("verifiers")
    rubric = vf.Rubric(funcs=[function])
    state = {"prompt": [], "completion": [], "answer": "", "task": "", "info": {}, "trajectory": [],
             "timing": {"scoring_ms": 0.0, "total_ms": 0.0}, "input": {}}  # fmt: skip
    asyncio.run(rubric.score_rollout(state))
    return float(state["reward"])  # type: ignore[arg-type]


@check("verifiers")
def reward_raises() -> Any:
    def broken(completion: Any) -> float:
        raise TimeoutError("the judge did not answer")

    return rubric_gives(broken)


@check("verifiers")
def reward_is_nan() -> Any:
    return str(rubric_gives(lambda completion: math.nan))


@check("verifiers")
def reward_is_text() -> Any:
    return rubric_gives(lambda completion: "0.5")


def math_pays(gold: str, said: str) -> bool:
    of: Any = import_module("math_verify")
    return bool(of.verify(of.parse(gold), of.parse(said)))


@check("verifiers")
def math_of_a_denial() -> Any:
    return math_pays("$16$", "It is not 16.")


@check("verifiers")
def math_of_a_list() -> Any:
    return [math_pays("$16$", f"{' '.join(map(str, range(17)))}"), math_pays("$16$", "14, 15, 16")]


@check("verifiers")
def math_of_two_boxes() -> Any:
    return [
        math_pays("$16$", said) for said in (r"\boxed{16} \boxed{17}", r"\boxed{17} \boxed{16}")
    ]


@check("verifiers")
def math_of_an_interval() -> Any:
    return [math_pays("$(1,2)$", r"$\{1,2\}$"), math_pays(r"$\{1,2\}$", "$(1,2)$"),
            math_pays("$(1,2)$", "$[1,2]$"), math_pays("$1,2$", "$2,1$")]  # fmt: skip


@check("verifiers")
def math_of_order() -> Any:
    return [math_pays("$x=5$", "$5$"), math_pays("$5$", "$x=5$")]


@check("verifiers")
def math_of_percent() -> Any:
    return [math_pays("$50$", r"$50\%$"), math_pays("$0.5$", r"$50\%$"), math_pays("$1/3$", "0.33")]


@check("verifiers")
def math_in_a_thread() -> Any:
    found: list[str] = []
    work = threading.Thread(target=lambda: found.append(raised(math_pays, "$16$", "$16$")))
    work.start()
    work.join()
    return found[0]


def loaded(rows: list[dict[str, Any]]) -> list[Any]:
    """The column `a` of JSON lines as `datasets` loads them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "t.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given: Any = {"data_files": str(file), "split": "train", "cache_dir": f"{folder}/cache"}
        return [row["a"] for row in import_module("datasets").load_dataset("json", **given)]


@check("verifiers")
def mixed_json() -> Any:
    rows = [{"a": value} for value in ("hi", "007", "null", [1])]
    made = import_module("datasets").Dataset.from_list(rows, on_mixed_types="use_json")
    return [row["a"] for row in made]


@check("verifiers")
def tiny_number() -> Any:
    return loaded([{"a": 1e-12}, {"a": [1]}])


@check("verifiers")
def date_text() -> Any:
    return str(loaded([{"a": "2026-01-02"}])[0])


# -- verifiers from 0.4 ----------------------------------------------------------------------------


def episode_of(fault: str) -> Any:
    """What verifiers says of an episode whose task fails: errors, and the reward."""
    from agentrl.core.config.derived import EnvironmentName
    from agentrl.environments import hosted, runner
    from agentrl.environments.plugins import verifiers

    seen: list[Any] = []

    def noted(episode: Any) -> Any:
        [trace] = episode.traces
        seen.append([len(episode.errors), len(trace.errors), trace.reward])
        return {"outcome": 0.0}

    verifiers.scores_of_episode = noted
    injected = ROOT / "tests/environments/injected"
    named = EnvironmentName.read(f"{injected}/plugins.py:VerifiersV1:faulty_taskset", {}, injected)
    os.environ["INJECTED_FAULT"] = fault

    async def said(role: str, messages: Any, tools: Any) -> Any:
        return {"role": "assistant", "content": "x"}

    async def play() -> None:
        async with runner.stage(named, timeout=120.0) as on:
            await on.play(hosted.tasks(named, "train")[0], said)

    asyncio.run(play())
    return seen[-1]


@check("verifiers-v1")
def v1_setup_raises() -> Any:
    return episode_of("set-up:exception")


@check("verifiers-v1")
def v1_scoring_times_out() -> Any:
    return episode_of("scoring:time-out")


@check("verifiers-v1")
def v1_finalize_raises() -> Any:
    return episode_of("clean-up:exception")


# -- reasoning-gym ---------------------------------------------------------------------------------


@check("reasoning-gym")
def silence_is_paid() -> Any:
    made = import_module("reasoning_gym").create_dataset
    found = {}
    for name in ("chain_sum", "leg_counting", "word_sorting", "countdown"):
        data = made(name, size=1, seed=1)
        found[name] = [data.score_answer(said, data[0]) for said in (None, "", "I do not know")]
    return found


@check("reasoning-gym")
def seeded_sizes() -> Any:
    made = import_module("reasoning_gym").create_dataset
    few, more = (made("chain_sum", size=size, seed=1) for size in (3, 5))
    return [few[i]["question"] == more[i]["question"] for i in range(3)]


@check("reasoning-gym")
def unseeded() -> Any:
    made = import_module("reasoning_gym").create_dataset
    both = [[row["question"] for row in made("chain_sum", size=5)] for _ in range(2)]
    return both[0] == both[1]


# -- TextArena -------------------------------------------------------------------------------------


def after_illegal_moves(name: str) -> Any:
    env = import_module("textarena").make(name)
    env.reset(num_players=1, seed=3)
    done = False
    while not done:
        env.get_observation()
        done, _ = env.step(action="nothing")
    return env.close()[0]


@check("textarena")
def illegal_frozen_lake() -> Any:
    return after_illegal_moves("FrozenLake-v0")[0]


@check("textarena")
def illegal_slitherlink() -> Any:
    return type(after_illegal_moves("Slitherlink-v0")[0]).__name__


@check("textarena")
def ends_without_rewards() -> Any:
    env = import_module("textarena").make("FrozenLake-v0")
    env.reset(num_players=1, seed=3)
    return env.close()[0]


def lake(seed: int) -> str:
    env = import_module("textarena").make("FrozenLake-v0")
    env.reset(num_players=1, seed=seed)
    return str(env.get_observation())


@check("textarena")
def seeded_board() -> Any:
    return [lake(3) == lake(3), lake(3) == lake(4)]


@check("textarena")
def seeds_the_process() -> Any:
    drawn = []
    for _ in range(2):
        lake(3)
        drawn.append(random.random())
    return drawn[0] == drawn[1]


# -- PettingZoo ------------------------------------------------------------------------------------


@check("pettingzoo")
def simultaneous_first_mover() -> Any:
    env = import_module("pettingzoo.classic.rps_v2").env(max_cycles=1)
    env.reset(seed=1)
    found = []
    for action in (0, 2):  # rock, then scissors: the first wins
        env.step(action)
        found.append([float(env.rewards[agent]) for agent in env.possible_agents])
    return found


@check("pettingzoo")
def winning_move() -> Any:
    env = import_module("pettingzoo.classic.tictactoe_v3").env()
    env.reset(seed=1)
    for action in (0, 1, 3, 4, 6):
        env.step(action)
    return [float(env.rewards[agent]) for agent in env.possible_agents]


@check("pettingzoo")
def illegal_move() -> Any:
    env = import_module("pettingzoo.classic.tictactoe_v3").env()
    env.reset(seed=1)
    env.step(0)
    env.step(0)
    return [float(env.rewards[agent]) for agent in env.possible_agents]


# -- Gymnasium -------------------------------------------------------------------------------------


def broken_gym(**given: Any) -> Any:
    gym: Any = import_module("gymnasium")

    class Broken(gym.Env):  # type: ignore[misc]
        observation_space = action_space = gym.spaces.Discrete(2)

        def reset(self, **_: Any) -> Any:
            return given.get("reset", (0, {}))

        def step(self, action: Any) -> Any:
            return 0, given.get("reward", 1.0), True, False, {}

    gym.register("Broken-v0", entry_point=Broken)
    return gym.make("Broken-v0", disable_env_checker=True)


@check("gymnasium")
def step_gives_nan() -> Any:
    env = broken_gym(reward=math.nan)
    env.reset()
    return str(env.step(0)[1])


@check("gymnasium")
def reset_gives_none() -> Any:
    def unpacked() -> Any:
        observation, _ = broken_gym(reset=None).reset()
        return observation

    return raised(unpacked)


@check("gymnasium")
def step_after_the_end() -> Any:
    env = import_module("gymnasium").make("FrozenLake-v1", is_slippery=False)
    env.reset(seed=3)
    taken = [env.step(action) for action in (1, 1, 2, 1, 2, 2, 2)]  # to the goal, and on
    return [[float(step[1]), bool(step[2])] for step in taken if step[0] == 15]


def steps(env: Any, **seed: int) -> list[Any]:
    env.reset(**seed)
    return [int(env.step(2)[0]) for _ in range(5)]


@check("gymnasium")
def seeded_steps() -> Any:
    make = import_module("gymnasium").make
    first, again = steps(make("FrozenLake-v1"), seed=3), steps(make("FrozenLake-v1"), seed=3)
    others = [steps(make("FrozenLake-v1"), seed=seed) for seed in range(4, 9)]
    return [first == again, all(first == other for other in others)]


@check("gymnasium")
def seeded_second_episode() -> Any:
    make, found = import_module("gymnasium").make, []
    for _ in range(2):
        env = make("FrozenLake-v1")
        steps(env, seed=3)
        found.append([steps(env) for _ in range(4)])
    return found[0] == found[1]


@check("gymnasium")
def unseeded_actions() -> Any:
    drawn = []
    for _ in range(2):
        env = import_module("gymnasium").make("FrozenLake-v1")
        env.reset(seed=3)
        drawn.append([int(env.action_space.sample()) for _ in range(20)])
    return drawn[0] == drawn[1]


# -- OpenAI evals ----------------------------------------------------------------------------------


def matches(function: str, *given: Any) -> float:
    utils: Any = import_module("evals.elsuite.utils")
    return float(getattr(utils, function)(*given))


@check("openai-evals")
def match_by_prefix() -> Any:
    """What `Match` counts: whether the answer begins with the ideal one."""
    from agentrl.environments.plugins.verdicts import placeholder_key

    os.environ["EVALS_THREADS"] = "1"
    with placeholder_key():
        api, record = import_module("evals.api"), import_module("evals.record")
    seen: list[Any] = []
    record._default_recorder.set(
        type("Recorder", (), {"record_match": lambda self, correct, **_: seen.append(correct)})()
    )
    for said in ("16 or 17", "160", "The answer is 16", "16"):
        api.record_and_check_match(prompt="", sampled=said, expected="16")
    return seen


@check("openai-evals")
def fuzzy() -> Any:
    return [matches("fuzzy_match", said, "16") for said in ("1", "It is not 16.", "160")]


# -- BFCL ------------------------------------------------------------------------------------------


@check("bfcl")
def formulas() -> Any:
    """Whether its checker of calls takes each for x**3; without the list of its models' clients."""
    models: Any = ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = {}
    sys.modules[models.__name__] = models
    checker: Any = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    python = import_module("bfcl_eval.constants.enums").Language.PYTHON
    parameters = {"properties": {"formula": {"type": "string"}}, "required": ["formula"]}
    function, listed = {"name": "integrate", "parameters": parameters}, {"formula": ["x**3"]}
    return [
        checker.simple_function_checker(
            function, {"integrate": {"formula": given}}, {"integrate": listed}, python, "any"
        )["valid"]
        for given in ("x**3", "x*3", "x-3", "x/3", "x+3")
    ]


def main() -> None:
    logging.disable(logging.CRITICAL)
    os.environ["HF_HUB_OFFLINE"] = "1"
    [plugin] = sys.argv[1:]
    found, printed = {}, io.StringIO()
    for name, function in CHECKS[plugin].items():
        with contextlib.redirect_stdout(printed):
            try:
                found[name] = function()
            except Exception as error:  # noqa: BLE001 - one check of several
                found[name] = f"failed: {type(error).__name__}: {error}"
        print(name, found[name], file=sys.stderr, flush=True)
    versions = {package: version(package) for package in PACKAGES[plugin]}
    print(json.dumps({"versions": versions, "found": found}))


if __name__ == "__main__":
    main()
