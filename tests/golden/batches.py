"""Five kinds of batches for golden numbers of algorithms: `batches.jsonl`, a group a line.

`python -m tests.golden.batches --write` makes them again, from random numbers with a seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.golden import files
from tests.golden.tiny import VOCABULARY, TinyModel

KINDS = ("text", "team", "branches", "process", "pairs")
Record = dict[str, Any]


@cache
def stored() -> dict[str, list[Record]]:
    """The groups of each kind."""
    found: dict[str, list[Record]] = {kind: [] for kind in KINDS}
    for line in (files.HERE / "batches.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found[record.pop("kind")].append(record)
    return found


class Writer:
    """Calls whose tokens are random and whose log-probs are near those of the tiny model."""

    def __init__(self, kind: str) -> None:
        self.draw, self.model = random.Random(f"golden {kind}"), TinyModel()

    def tokens(self, most: int, least: int = 1) -> list[int]:
        count = self.draw.randint(least, most)
        return [self.draw.randrange(1, VOCABULARY) for _ in range(count)]

    def call(
        self, id: str, prompt: list[int], see: str, say: str, most: int = 3, **more: Any
    ) -> Record:
        completion = self.tokens(most)
        tokens = prompt + completion
        at = list(range(len(prompt), len(tokens)))
        rows = self.model.logprobs(tokens, at).detach()
        known = [float(row[token]) for row, token in zip(rows, completion, strict=True)]
        noisy = [round(x + self.draw.gauss(0, 0.2), 3) for x in known]
        messages = [{"role": "user", "content": see}]
        answer = {"role": "assistant", "content": say}
        return {
            "id": id,
            "prompt": prompt,
            "completion": completion,
            "logprobs": [min(x, -0.001) for x in noisy],
            "messages": messages,
            "answer": answer,
            **more,
        }

    def value(self) -> float:
        return self.draw.randint(0, 8) / 8

    def conversation(self, id: str, turns: int, start: list[int], **more: Any) -> list[Record]:
        """Calls of which each reads all before it."""
        calls: list[Record] = []
        prompt = start
        for turn in range(turns):
            state = f"state {self.draw.randint(0, 2)}" if turn else f"task {start[0]}"
            say = self.draw.choice(["left", "right"])
            calls.append(self.call(f"{id}/{turn}", prompt, state, say, **more))
            prompt = [*prompt, *calls[-1]["completion"], *self.tokens(2)]
        return calls


def text() -> Iterator[Record]:
    """One role: groups of five, two and one; equal rewards, a missing one, cut answers, a greedy
    rollout, versions that change in a call."""
    write = Writer("text")
    outcomes = [[1.0, 0.0, 0.25, None, 0.0], [1.0, 0.5], [0.5, 0.5], [0.75]]
    for g, rewards in enumerate(outcomes):
        start, rollouts = [g + 3, 2], []
        for u, outcome in enumerate(rewards):
            id = f"text-{g}-{u}"
            calls = write.conversation(id, 1 + (g + u) % 3, start, version=4)
            if u == 1:
                calls[-1]["finish"] = "length"
            if (g, u) == (1, 0):
                for call in calls:
                    call["temperature"] = 0.0
            if (g, u) == (0, 2):
                calls[0]["spans"] = [[0, 3], [1, 4]]
                calls[0]["completion"] += [5]
                calls[0]["logprobs"] += [-2.125]
                calls[0]["version"] = 3
                calls[1:] = []
            rows = [] if outcome is None else [["rollout", "outcome", None, outcome]]
            rows.append(["rollout", "style", None, write.value()])
            rollouts.append(
                {"id": id, "rewards": rows, "calls": calls, "task": {"kind": f"k{g % 2}"}}
            )
        yield {"kind": "text", "group": f"text-{g}", "rollouts": rollouts}


NAMES = (
    "process",
    "turn",
    "sub",
    "maporl",
    "marti",
    "hindsight",
    "demonstrated",
    "told",
    "cross",
    "v",
)


def team() -> Iterator[Record]:
    """Planner, solver and critic with rewards of roles and of calls; one role is once absent."""
    write = Writer("team")
    for g in range(2):
        rollouts = []
        for u in range(4):
            id, calls = f"team-{g}-{u}", list[Record]()
            roles = ["planner", "solver", "solver", "critic"][: 4 - (u == 3)]
            for turn, role in enumerate(roles):
                prompt = [g + 3, *write.tokens(2)]
                state, say = (
                    f"{role} sees {write.draw.randint(0, 1)}",
                    write.draw.choice(["left", "right"]),
                )
                calls.append(write.call(f"{id}/{turn}", prompt, state, say, role=role))
            rows: list[list[Any]] = [
                ["rollout", name, None, write.value()] for name in ("outcome", "style")
            ]
            for role in dict.fromkeys(roles):
                rows += [
                    ["role", name, role, write.value()]
                    for name in ("outcome", "difference", "shapley")
                ]
            rows += [
                ["transition", name, call["id"], write.value()]
                for call in calls
                for name in ("sub", "maporl", "marti", "cross", "v")
            ]
            rollouts.append({"id": id, "rewards": rows, "calls": calls, "task": {"kind": f"k{g}"}})
        yield {"kind": "team", "group": f"team-{g}", "rollouts": rollouts}


def both(outcome: float, write: Writer) -> list[list[Any]]:
    return [["rollout", "outcome", None, outcome], ["rollout", "style", None, write.value()]]


def branches() -> Iterator[Record]:
    """Rollouts that branch from others: their first calls are repeated, not sampled."""
    write = Writer("branches")
    for g in range(2):
        rollouts = []
        for u in range(2):
            id = f"branches-{g}-{u}"
            trunk = write.conversation(id, 3, [g + 3, 9])
            rollouts.append({"id": id, "rewards": both(write.value(), write), "calls": trunk})
            for b in range(2):
                own, kept = f"{id}-b{b}", b + 1
                calls = [
                    {**call, "id": f"{own}/{i}", "repeats": call["id"]}
                    for i, call in enumerate(trunk[:kept])
                ]
                calls += write.conversation(own, 3 - kept, list(trunk[kept]["prompt"]))
                for i, call in enumerate(calls):
                    call["id"] = f"{own}/{i}"
                rollouts.append(
                    {
                        "id": own,
                        "rewards": both(write.value(), write),
                        "calls": calls,
                        "branch": {"rollout": id, "calls": kept},
                    }
                )
        yield {"kind": "branches", "group": f"branches-{g}", "rollouts": rollouts}


def process() -> Iterator[Record]:
    """Rewards of every scope, most calls with one of each name, in few states."""
    write = Writer("process")
    for g in range(3):
        rollouts = []
        for u in range(3):
            id = f"process-{g}-{u}"
            calls = write.conversation(id, 2 + (g + u) % 2, [g + 3, 7])
            for turn, call in enumerate(calls):
                call["role"] = "planner" if turn == 0 else "agent"
            rows: list[list[Any]] = [
                ["rollout", name, None, write.value()] for name in ("outcome", "process", "style")
            ]
            rows += [
                ["transition", name, call["id"], round(write.draw.uniform(-1, 1), 3)]
                for call in calls
                for name in NAMES
                if name == "v" or write.draw.random() < 0.85
            ]
            rows += [["role", "outcome", role, write.value()] for role in ("planner", "agent")]
            rollouts.append({"id": id, "rewards": rows, "calls": calls, "task": {"kind": f"k{g}"}})
        yield {"kind": "process", "group": f"process-{g}", "rollouts": rollouts}


def pairs() -> Iterator[Record]:
    """Better and worse answers to one prompt, a tie, and three answers with a ranking."""
    write = Writer("pairs")
    for g, outcomes in enumerate([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.2, 0.9, 0.6], [1.0, 0.3]]):
        prompt = [g + 3, *write.tokens(3)]
        rollouts = []
        for u, outcome in enumerate(outcomes):
            id = f"pairs-{g}-{u}"
            say = f"answer {u}"
            calls = [write.call(f"{id}/0", prompt, f"question {g}", say, most=5)]
            rollouts.append({"id": id, "rewards": both(outcome, write), "calls": calls})
        yield {"kind": "pairs", "group": f"pairs-{g}", "rollouts": rollouts}


def main() -> None:
    lines = [
        json.dumps(record, sort_keys=True, separators=(",", ":"))
        for make in (text, team, branches, process, pairs)
        for record in make()
    ]
    (files.HERE / "batches.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
