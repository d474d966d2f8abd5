"""One turn, a weighted metric, and a reward for each call."""

import random
from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"]


class Words(vf.SingleTurnEnv):
    async def add_trajectory_step(self, state: Any, step: Any) -> None:
        step["reward"] = float(len(step["completion"]))
        await super().add_trajectory_step(state, step)


def rows(many: int, seed: int) -> Any:
    rng = random.Random(seed)
    pairs = [rng.sample(WORDS, 2) for _ in range(many)]
    asked = "Which word comes first in the alphabet: {} or {}?"
    return Dataset.from_list([{"question": asked.format(*p), "answer": min(p)} for p in pairs])


async def first(parser: Any, completion: Any, answer: str) -> float:
    return float((parser.parse_answer(completion) or "").strip() == answer)


async def short(completion: Any) -> float:
    return float(len(completion[-1]["content"] or "") < 12)


def load_environment(judged: bool = False, broken: bool = False, grouped: bool = False) -> Any:
    def fails(completion: Any) -> float:
        raise KeyError("gone")

    def best(completions: Any) -> list[float]:
        return [1.0] * len(completions)

    async def agreed(judge: Any, prompt: Any, completion: Any, answer: str, state: Any) -> float:
        return float("yes" in await judge(prompt, completion, answer, state))

    functions = [first, short, *[fails] * broken, *[best] * grouped]
    rubric: Any = vf.Rubric(funcs=functions, weights=[1.0, 0.0, *[1.0] * (broken + grouped)])
    if judged:
        rubric = vf.JudgeRubric()
        rubric.add_reward_func(agreed)
    kind = vf.SingleTurnEnv if judged else Words
    return kind(dataset=rows(100, 0), eval_dataset=rows(20, 1), rubric=rubric, parser=vf.Parser())
