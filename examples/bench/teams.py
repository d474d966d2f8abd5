"""Teams of roles, each a model name: a relay, a debate, and a planner with workers.

relay: every role translates the word that it is told, by a table of its own, and tells the next;
the outcome is 1 if the last word is right. A wrong word on the way can hardly be made good.

debate: every role is told the question and says a word; then every role sees all words and says a
last one. The outcome is the share of last words that are right. In the first round each role can
read one half of the questions alone, so what it says later depends on what others said.

workers: a planner asks three of four workers, by a tool, about a topic that only one of them knows.
The outcome is 1 if that one was asked and its word is right, whatever the others say.
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

from tools import WORDS, Message, Tool, answer_tool, choose, say, tool

TOPICS = ["river", "stone", "cloud", "ember", "forest", "meadow", "canyon", "harbor"]
ROLES = ["role1", "role2", "role3", "role4"]
WORKERS = ["worker0", "worker1", "worker2", "worker3"]
NOTES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gail", "Hugo", "Ines", "Jon", "Kim", "Leo"]
ASKED = 3  # workers
ASK = tool("ask", "worker", WORKERS)
BEST = 1.0
_dice = random.Random("teams")
TABLES = {role: dict(zip(WORDS, _dice.sample(WORDS, 4), strict=True)) for role in ROLES}
ANSWERS = {topic: _dice.choice(WORDS) for topic in TOPICS}
EXPERT = {topic: WORKERS[n % 4] for n, topic in enumerate(TOPICS)}


async def relay(task: dict[str, Any]) -> str:
    word = task["word"]
    for role in ROLES[: task["roles"]]:
        word = await say(f"{role} {task['note']} {word}", role)
    return word


def verify_relay(task: dict[str, Any], result: str) -> float:
    word = task["input"]["word"]
    for role in ROLES[: task["input"]["roles"]]:
        word = TABLES[role][word]
    return float(result == word)


async def debate(task: dict[str, Any]) -> list[str]:
    """The last words. Half of the roles can read the topic; the others are told that it is one."""
    roles, topic = ROLES[: task["roles"]], task["topic"]
    able = [(TOPICS.index(topic) + n) % 2 == 0 for n in range(len(roles))]
    firsts = [
        await say(f"{role} {task['note']} {topic if can else 'unknown'}", role)
        for role, can in zip(roles, able, strict=True)
    ]
    heard = " ".join(word if word in WORDS else "unknown" for word in firsts)
    return [
        await say(f"{role} {task['note']} {topic if can else 'unknown'} heard {heard}", role)
        for role, can in zip(roles, able, strict=True)
    ]


def verify_debate(task: dict[str, Any], result: list[str]) -> float:
    right = ANSWERS[task["input"]["topic"]]
    return sum(word == right for word in result) / len(result)


async def workers(task: dict[str, Any]) -> dict[str, str]:
    """What each worker that was asked said last."""
    asked = f"{task['note']} {task['topic']}"
    messages: list[Message] = [{"role": "system", "content": "plan"}]
    messages.append({"role": "user", "content": asked})
    said: dict[str, str] = {}
    for _ in range(ASKED):
        _, worker = await choose(messages, ASK, model="planner")
        if worker:
            said[worker] = await say(f"{worker} {asked}", worker)
        answer_tool(messages, said.get(worker, "nobody"))
    return said


def verify_workers(task: dict[str, Any], result: dict[str, str]) -> float:
    topic = task["input"]["topic"]
    return float(result.get(EXPERT[topic]) == ANSWERS[topic])


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """Of any role of any team: the prompts differ."""
    if tools:
        return "ask", EXPERT[messages[1]["content"].split()[1]]
    role, _, *told = messages[-1]["content"].split()
    if role in WORKERS:
        return "", ANSWERS[told[0]] if EXPERT[told[0]] == role else random.choice(WORDS)
    if told[0] in WORDS:
        return "", TABLES[role][told[0]]
    if told[0] in ANSWERS:
        return "", ANSWERS[told[0]]
    heard = told[2:]  # those that follow and precede the role can read what it cannot
    word = heard[(ROLES.index(role) + 1) % len(heard)] if heard else "unknown"
    return "", word if word in WORDS else random.choice(WORDS)


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The best word or worker, or the one after it, with equal chances."""
    name, chosen = best(messages, tools)
    known = WORKERS if tools else WORDS
    return name, random.choice([chosen, known[(known.index(chosen) + 1) % len(known)]])


RANDOM = 1 / 4
RANDOM_WORKERS = (1 - (3 / 4) ** ASKED) / 4


def tasks(notes: list[str], times: int, **fields: list[Any]) -> list[dict[str, Any]]:
    """One for each combination of the notes and of the values of the fields."""
    inputs = [
        dict(zip(fields, values, strict=True)) | {"note": note}
        for values in product(*fields.values())
        for note in notes
    ]
    made = [
        {"id": f"{'/'.join(map(str, one.values()))}/{n}", "input": one}
        for n in range(times)
        for one in inputs
    ]
    random.Random("tasks").shuffle(made)
    return made


TRAIN, HELD = NOTES[:9], NOTES[9:]


def split(times: int, **fields: list[Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out tasks, which have other notes."""
    return tasks(TRAIN, 1, **fields), tasks(HELD, times, **fields)


relay2, relay2_heldout = split(6, word=WORDS, roles=[2])
relay4, relay4_heldout = split(6, word=WORDS, roles=[4])
debate2, debate2_heldout = split(3, topic=TOPICS, roles=[2])
debate4, debate4_heldout = split(3, topic=TOPICS, roles=[4])
workers4, workers4_heldout = split(3, topic=TOPICS)


def build_relay2(folder: Path, seed: int) -> None:
    from policies import build

    build(relay, habit, relay2 + relay2_heldout, 0.8, folder, seed)


def build_relay4(folder: Path, seed: int) -> None:
    from policies import build

    build(relay, habit, relay4 + relay4_heldout, 0.8, folder, seed)


def build_debate2(folder: Path, seed: int) -> None:
    from policies import build

    build(debate, habit, debate2 + debate2_heldout, 0.8, folder, seed)


def build_debate4(folder: Path, seed: int) -> None:
    from policies import build

    build(debate, best, debate4 + debate4_heldout, 0.0, folder, seed)


def build_workers(folder: Path, seed: int) -> None:
    from policies import build

    build(workers, habit, workers4 + workers4_heldout, 0.8, folder, seed)
