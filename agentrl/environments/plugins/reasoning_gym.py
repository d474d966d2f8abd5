"""reasoning-gym: puzzles without end, and their scorers. WHAT is a data set, as `chain_sum`."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator
from typing import Any

from agentrl.environments import Environment
from agentrl.environments.plugins.shared import question_in
from agentrl.environments.toolbox import number
from agentrl.types import Json


class ReasoningGym(Environment):
    requires = ("reasoning-gym==0.1.25",)

    def __init__(
        self, what: str, size: int = 500, heldout: int = 100, seed: int = 7, system: str = "",
        **config: Any,
    ) -> None:  # fmt: skip
        """`config`: of the data set. `system`: a system prompt, or the name of one of theirs, most
        of which ask for the answer in <answer> tags; it is taken out of them."""
        import reasoning_gym
        from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

        self.what, self.system = what, SYSTEM_PROMPTS.get(system, system)
        self.extract = extract_answer
        # Entry i is made from seed + i: the next seed would give nearly the same puzzles.
        splits = {"train": (seed, size), "heldout": (seed + size, heldout)}
        self.data = {
            split: reasoning_gym.create_dataset(what, seed=start, size=many, **config)
            for split, (start, many) in splits.items()
        }

    def tasks(self, split: str) -> Iterator[dict[str, Json]]:
        told = [{"role": "system", "content": self.system}] if self.system else []
        for i, entry in enumerate(self.data[split]):
            asked, where = entry["question"], {"split": split, "index": i}
            given = [*told, {"role": "user", "content": asked}] if told else asked
            # As Python, because JSON has no tuples, which the scorers compare.
            yield {"id": f"{self.what}/{split}/{i}", "input": given, **where, "entry": repr(entry)}

    def verify(self, task: dict[str, Any], result: Json) -> float:
        said, entry = result if isinstance(result, str) else str(result), self._entry(task)
        score = self.data["train"].score_answer
        try:
            found = score(self.extract(said) or said.strip(), entry)
        except (OSError, MemoryError):  # such as a time-out, which no answer causes
            raise
        except Exception:  # noqa: BLE001 - some scorers parse an answer without a check
            score(entry["answer"] or "", entry)  # raises if it is not the answer's fault
            return 0.0
        return number(found)

    def solution(self, given: Any) -> list[str] | None:
        asked = question_in(given)
        entries = (entry for rows in self.data.values() for entry in rows)
        found = next((entry["answer"] for entry in entries if entry["question"] == asked), None)
        return None if found is None else [found]

    def _entry(self, task: dict[str, Any]) -> dict[str, Any]:
        """The entry of a task. It is made again only if it is no literal, because five generators
        make another one in another process (they iterate over sets of texts)."""
        try:
            entry: dict[str, Any] = literal_eval(task["entry"])
        except ValueError:
            entry = self.data[task["split"]][task["index"]]
            if entry["question"] != question_in(task["input"]):
                raise RuntimeError("set PYTHONHASHSEED=0, or each process has others") from None
        return entry
