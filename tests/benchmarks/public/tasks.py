"""The public tasks: of each the right answer by a rule of our own, and the judgement of a reply.
The environments' scorers are used for nothing but the reward."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from tests.benchmarks.public.measures import WRONG, Right, calls, listed, number, word

Row = dict[str, Any]  # a task of the environment
Turns = Sequence[tuple[str, str]]  # the last message to the model, and its reply


@dataclass(frozen=True)
class Public:
    name: str  # of its run file
    plugin: str
    # The right answer of a question; where only a search finds it, the environment's key.
    truth: Callable[[str, Row], str]
    right: Callable[[str, str, str], Right]  # of question, reply and answer
    form: str = "{}"  # in which the environment reads an answer
    teacher: str = ""  # function of `teachers.py` that shows the form, where one is needed

    def judge(self, row: Row, turns: Turns) -> Right:
        """Of the last turn."""
        if not turns:
            return WRONG
        question, reply = turns[-1]
        return self.right(question, reply, self.truth(question, row))


def keyed(_: str, row: Row) -> str:
    return str(row["answer"])


def numeric(question: str, reply: str, answer: str) -> Right:
    return number(question, reply, float(answer))


# -- sums: "... arithmetic problem: 12 - 5 ="
def total(question: str, _: Row) -> str:
    terms = re.findall(r"([-+]?)\s*(\d+)", question.rpartition(":")[2])
    return str(sum(int(sign + digits) for sign, digits in terms))


# -- needles: "Ann likes tea. Bob likes it, too. \nWho likes tea? Reply only with a name."
def who(question: str, _: Row) -> str:
    text, question_line = question.rsplit("\n", 1)
    predicate = re.sub(r"^Who |\? Reply only with a name\.$", "", question_line)
    [name] = [
        fact.removesuffix(f" {predicate}") for fact in facts(text) if fact.endswith(f" {predicate}")
    ]
    return name


def facts(text: str) -> list[str]:
    return text.strip().rstrip(".").split(". ")


def person(question: str, reply: str, answer: str) -> Right:
    """No other name of the text stands in the reply, even one of several words."""
    statements = facts(question.rsplit("\n", 1)[0])
    return word(reply, answer, [fact.split()[0] for fact in statements])


# -- families: the last words are "How is A related to B? Provide the relationship in one word."
RELATIONS = """mother father wife husband son daughter brother sister grandmother grandfather
grandson granddaughter mother-in-law father-in-law son-in-law daughter-in-law brother-in-law
sister-in-law aunt uncle niece nephew cousin grandparent grandchild parent child sibling spouse"""


def relation(_: str, reply: str, answer: str) -> Right:
    normalised = re.sub(r"[- ]in[- ]law", "-in-law", reply)
    return word(normalised, answer, RELATIONS.split())


# -- products: "Solve the following multiplication: 2 * 4. Give only the result ..."
def product(question: str, _: Row) -> str:
    *_, factors = re.findall(r"multiplication: ([-\d* ]+)\.", question)
    return str(prod(map(int, factors.split("*"))))


# -- words: "... sort these words in ascending order (...) and return them ...: b, a"
def in_order(question: str, _: Row) -> str:
    *_, request = re.findall(r"sort these words in (?:as|des)cending order.*", question)
    words = request.rpartition(":")[2].strip().split(", ")
    return ", ".join(sorted(words, reverse="in descending" in request))


def sequence(_: str, reply: str, answer: str) -> Right:
    return listed(reply, answer.split(", "))


# -- letters: 'How many times does the letter "u" appear in the text: "..."?'
def occurrences(question: str, _: Row) -> str:
    match = re.search(r'the letter "(.)" appear in the text: "(.*)"\?', question, re.DOTALL)
    assert match is not None
    return str(match[2].lower().count(match[1].lower()))


# -- cups: "Ball starts: [0] [X] [2] ... swapped cups 0 and 1. ..."
def cup(question: str, _: Row) -> str:
    started = re.search(r"Ball starts: (.*)", question)
    assert started is not None
    ball = started[1].split().index("[X]")
    for left, right in re.findall(r"swapped cups (\d+) and (\d+)", question):
        ball = {int(left): int(right), int(right): int(left)}.get(ball, ball)
    return str(ball)


def chosen_cup(_: str, reply: str, answer: str) -> Right:
    return word(reply, answer, "012")


# -- calls: the request is in the conversation, the calls that BFCL allows are in its package
DATA = Path(__file__).parents[3] / ".environments" / "bfcl"


@cache
def allowed() -> dict[str, str]:
    files = DATA.glob("lib/python*/site-packages/bfcl_eval/data/possible_answer/*.json")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {row["id"]: json.dumps(row["ground_truth"]) for row in rows}


def requested(_: str, row: Row) -> str:
    return allowed()[row["input"]]


def right_calls(_: str, reply: str, answer: str) -> Right:
    return calls(reply, json.loads(answer))


TASKS = {
    task.name: task
    for task in (
        Public("needle-haystack", "reasoning-gym", who, person, teacher="names"),
        Public("chain-sum", "reasoning-gym", total, numeric),
        Public("family-relationships", "reasoning-gym", keyed, relation, teacher="relations"),
        Public("word-sorting", "reasoning-gym", in_order, sequence, teacher="words"),
        Public("letter-counting", "reasoning-gym", occurrences, numeric),
        Public("three-cards", "textarena", cup, chosen_cup, "[{}]", teacher="cups"),
        Public(
            "products", "verifiers", product, numeric, "<answer>{}</answer>", teacher="products"
        ),
        Public("function-calls", "bfcl", requested, right_calls, teacher="functions"),
    )
}
