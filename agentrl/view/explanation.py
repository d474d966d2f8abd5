"""Read the output of `agentrl explain` into tables: rewards, and the way from them to each call's
weight. What it does not know is kept as a note, so that nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentrl.store.records import CallRow
from agentrl.view.records import Paging

HEADING = re.compile(r"\S.*, step \d+, .+")
REWARD = re.compile(r"  (?P<name>.+?) = (?P<value>\S+) \((?P<source>.*)\)")
CALL = re.compile(r"call (?P<id>\S+), (?P<role>.+), (?P<tokens>\d+) tokens(?: by (?P<by>.+))?")
LINK = re.compile(r"  (?P<depth> *)(?P<text>.+): (?P<numbers>(?:[a-z]+ [-\d. e+]+(?:, )?)+)")
MISSING = re.compile(r"  (?P<depth> *)(?P<text>.+): (?P<numbers>(?:[a-z]+ (?:missing|[^,]+),? ?)+)")
WEIGHT = re.compile(
    r"  weight in the loss \(psi\): (?P<psi>.+) per token \((?P<factors>advantage .+)\)"
)
WORDS = {  # of parts of a credit
    "GroupRelative": "Compared with the group",
    "GrpoScale": "Divided by the group's spread",
    "PeerAdvantages": "Compared with rollouts that came to the same state",
    "ReturnScale": "Scaled by the spread of the returns",
    "sum": "All of these together",
}


def read(text: str, calls: Sequence[CallRow] = (), at: int | None = None) -> dict[str, Any]:
    """Values of the template: what is said first (`verdict`), `rewards`, a page of `calls` with
    their steps and weight, `gates`, `notes`, `text`. at: a call on the page."""
    rewards: list[dict[str, str]] = []
    found: list[dict[str, Any]] = []
    verdict: list[str] = []
    gates: list[str] = []
    notes: list[str] = []
    order, place = {call.id: at for at, call in enumerate(calls)}, verdict
    for line in text.splitlines():
        if call := CALL.fullmatch(line):
            found.append(call.groupdict() | {"at": order.get(call["id"]), "steps": []})
            found[-1] |= {"weight": None, "notes": []}
        elif line.strip() in ("rewards", "none"):
            continue
        elif HEADING.fullmatch(line):
            place = notes
        elif line == "gates and penalties":
            place = gates
        elif not found and (row := REWARD.fullmatch(line)):
            rewards.append(row.groupdict())
        elif found and place is not gates and line.startswith(" "):
            _of_call(found[-1], line)
        elif line.strip():
            place.append(line.strip())
    paging = Paging.of(len(found), at)
    found = found[paging.first : paging.end]
    for each in found:  # each step goes on with what the one before it found
        depths = [step["depth"] for step in each["steps"]]
        each["chain"] = len({*depths}) == len(depths)
    shown = {"verdict": verdict, "rewards": rewards, "calls": found, "gates": gates}
    return {**shown, "notes": notes, "text": text, "paging": paging}


def _of_call(call: dict[str, Any], line: str) -> None:
    if weight := WEIGHT.fullmatch(line):
        call["weight"] = weight["psi"]
        parts = (part.rsplit(" ", 1) for part in weight["factors"].split(" x "))
        call["factors"] = [(name, value) for name, value in parts]
    elif link := LINK.fullmatch(line) or MISSING.fullmatch(line):
        numbers = dict(part.split(" ", 1) for part in link["numbers"].split(", "))
        text = link["text"].strip()
        step = {"text": text, "words": words(text), "depth": len(link["depth"]) // 2}
        call["steps"].append(step | {"numbers": numbers})
    else:
        call["notes"].append(line.strip())


def words(text: str) -> str:
    """A part of a credit in words, from its record: the name of a class and its fields."""
    factor, name = "", text
    if weighted := re.match(r"(.+?) x (?=[A-Z])", text):
        factor, name = f"{weighted[1]} × ", text[weighted.end() :]  # noqa: RUF001
    kind = re.split(r"[(\[]", name.partition(": ")[2] or name, maxsplit=1)[0]
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).capitalize()
    return factor + WORDS.get(kind, plain)
