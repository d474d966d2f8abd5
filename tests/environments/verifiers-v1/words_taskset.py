"""A taskset as `vf-init` writes one."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]
WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"]


class WordsData(vf.TaskData):
    answer: str


class WordsTask(vf.Task[WordsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class WordsConfig(vf.TasksetConfig):
    many: int = 40


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):
    def load(self) -> Iterator[WordsTask]:
        rng = random.Random(0)
        for i in range(self.config.many):
            a, b = rng.sample(WORDS, 2)
            asked = f"Which word comes first in the alphabet: {a} or {b}?"
            data = WordsData(prompt=asked, answer=min(a, b), name=f"words-{i}")
            yield WordsTask(data, self.config.task)
