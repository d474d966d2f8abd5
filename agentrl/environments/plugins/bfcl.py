"""BFCL's conversations of several turns: its users, its simulated APIs as tools, its checker."""

import json
from collections.abc import Iterable
from importlib import import_module
from importlib.resources import files
from typing import Any
from uuid import uuid4

from agentrl.environments import Environment, Episode
from agentrl.environments.toolbox import as_python, as_tool, as_tool_calls, fifths, number

CHECKER = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_"
MORE = "I have updated some more functions you can choose from. What about now?"  # as BFCL


def lines(name: str) -> list[Any]:
    return [*map(json.loads, (files("bfcl_eval") / "data" / name).read_text().splitlines())]


class Dialogue(Episode):
    def __init__(self, entry: dict[str, Any], truth: list[list[str]]) -> None:
        config = import_module("bfcl_eval.constants.executable_backend_config")
        names = map(config.MULTI_TURN_FUNC_DOC_FILE_MAPPING.get, entry["involved_classes"])
        self.docs = {d["name"]: d for name in names for d in lines(f"multi_turn_func_doc/{name}")}
        self.entry, self.truth, self.turn = entry, truth, 0
        self.made: list[list[list[str]]] = [[] for _ in truth]  # turn -> replies -> calls
        self.who = f"m{uuid4().hex}"  # instances are global variables whose names start with it

    def reset(self) -> Any:
        later = self.entry.get("missed_function", {}).items()  # turn -> functions told only then
        hidden = {name for turn, names in later if int(turn) > self.turn for name in names}
        self.tools = [as_tool(doc) for name, doc in self.docs.items() if name not in hidden]
        return self.entry["question"][self.turn] or [{"role": "user", "content": MORE}]

    def step(self, reply: dict[str, Any]) -> tuple[Any, float | None, bool]:
        if calls := reply.get("tool_calls"):
            self.made[self.turn] += [code := [as_python(c["function"], self.docs) for c in calls]]
            said, _ = import_module(f"{CHECKER}utils").execute_multi_turn_func_call(
                code, *map(self.entry.get, ("initial_config", "involved_classes")), self.who,
                self.entry["id"], long_context="long_context" in self.entry["id"])  # fmt: skip
            rows = [{"role": "tool", "tool_call_id": call["id"], "content": text}
                    for call, text in zip(calls, said, strict=True)]  # fmt: skip
            over = len(self.made[self.turn]) > 20  # BFCL's limit of a turn
            return rows, 0.0 if over else None, over
        self.turn += 1
        if self.turn < len(self.truth):
            return self.reset(), None, False
        check = import_module(f"{CHECKER}checker").multi_turn_checker
        return "", number(check(self.made, self.truth, self.entry, "", self.who)["valid"]), True

    def close(self) -> None:
        known = vars(import_module(f"{CHECKER}utils"))
        for name in [name for name in known if name.startswith(self.who)]:
            del known[name]


class BFCL(Environment):
    """BFCL's conversations of several turns, such as multi_turn_base."""

    requires = ("--no-deps bfcl-eval==2026.3.23", "mpmath==1.3.0")
    isolation, limit = "process", 200  # the simulated APIs are global variables

    def __init__(self, what: str) -> None:
        self.entries = {row["id"]: row for row in lines(f"BFCL_v4_{what}.json")}
        self.truth = {row["id"]: row for row in lines(f"possible_answer/BFCL_v4_{what}.json")}

    def tasks(self, split: str) -> Iterable[dict[str, Any]]:
        return fifths(self.entries, split)

    def open(self, input: Any) -> Dialogue:
        return Dialogue(self.entries[input], self.truth[input]["ground_truth"])

    def solution(self, input: Any) -> list[Any]:
        game = self.open(input)
        turns = [(as_tool_calls(turn, game.docs), "Done.") for turn in game.truth]
        return [reply for turn in turns for reply in turn if reply]
