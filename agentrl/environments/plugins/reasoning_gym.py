"""reasoning-gym: generated puzzles and their scorers. WHAT is a data set, such as `chain_sum`."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from agentrl.core.types import Json
from agentrl.environments import Environment
from agentrl.environments.plugins.verdicts import question_in
from agentrl.environments.toolbox import number


class ReasoningGym(Environment):
    requires = ("reasoning-gym==0.1.25",)

    def __init__(
        self, what: str, size: int = 500, heldout: int = 100, seed: int = 7, system: str = "",
        **config: Any,
    ) -> None:  # fmt: skip
        """`config`: arguments of the data set. `system`: a system prompt, or the name of a prompt
        of reasoning-gym. Most of its prompts ask for <answer> tags, from which the answer is
        extracted."""
        import reasoning_gym
        from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

        self.what, self.system = what, SYSTEM_PROMPTS.get(system, system)
        self.extract = extract_answer
        # Entry i is made from seed + i: the next seed would give nearly the same puzzles.
        splits = {"train": (seed, size), "heldout": (seed + size, heldout)}
        self.data = {
            split: reasoning_gym.create_dataset(what, seed=start, size=count, **config)
            for split, (start, count) in splits.items()
        }

    def tasks(self, split: str) -> Iterator[dict[str, Json]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        for i, entry in enumerate(self.data[split]):
            question, where = entry["question"], {"split": split, "index": i}
            task_input = [*system, {"role": "user", "content": question}] if system else question
            # As Python, because JSON has no tuples, which the scorers compare.
            fields = {"id": f"{self.what}/{split}/{i}", "answer": entry["answer"], **where}
            yield {"input": task_input, "entry": repr(entry), **fields}

    def verify(self, task: dict[str, Any], result: Json) -> float:
        answer, entry = result if isinstance(result, str) else str(result), self._entry(task)
        score = self.data["train"].score_answer
        try:
            value = score(self.extract(answer) or answer.strip(), entry)
        except (OSError, MemoryError):  # such as a time-out, which is not the answer's fault
            raise
        except Exception:  # noqa: BLE001 - some scorers parse an answer without a check
            # Raises if the scorer cannot score this item at all.
            score(entry["answer"] or "", entry)
            return 0.0
        return number(value)

    def solution(self, task_input: Any) -> list[str] | None:
        answer = self._answers.get(question_in(task_input))
        return None if answer is None else [answer]

    @cached_property
    def _answers(self) -> dict[str, str]:
        """Question -> answer. Cached, because a data set generates an entry again at each
        access."""
        return {entry["question"]: entry["answer"] for rows in self.data.values() for entry in rows}

    def _entry(self, task: dict[str, Any]) -> dict[str, Any]:
        """The entry of a task. It is generated again only if it is not a literal, because five
        generators return different entries in different processes (they iterate over sets of
        strings)."""
        try:
            entry: dict[str, Any] = literal_eval(task["entry"])
        except ValueError:
            entry = self.data[task["split"]][task["index"]]
            if entry["question"] != question_in(task["input"]):
                raise RuntimeError(
                    "the data set differs between processes: set PYTHONHASHSEED=0"
                ) from None
        return entry
