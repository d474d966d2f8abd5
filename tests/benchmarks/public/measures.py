"""Whether a reply is right, by rules that no environment here uses: strictly (it gives the right
answer and no other) and leniently (the right answer is somewhere in it)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

Right = tuple[bool, bool]  # strictly, leniently
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w]|\.\d)")
WRONG: Right = (False, False)


def number(question: str, reply: str, answer: float) -> Right:
    """The last number is the answer, and there is no other that the question does not have, such as
    the terms of a sum; leniently: any number is."""
    in_question = {float(text) for text in NUMBER.findall(question.replace(",", ""))}
    in_reply = [float(text) for text in NUMBER.findall(reply.replace(",", ""))]
    if answer not in in_reply:
        return WRONG
    return in_reply[-1] == answer and {*in_reply} <= in_question | {answer}, True


def word(reply: str, answer: str, others: Iterable[str]) -> Right:
    """The answer is named and none of the others; leniently: the answer is named."""
    if not named(reply, answer):
        return WRONG
    return not any(named(reply, other) for other in others if other.lower() != answer.lower()), True


def named(reply: str, answer: str) -> bool:
    """Whether a word stands in a reply; "mother" does not stand in "mother-in-law"."""
    return bool(re.search(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", reply, re.IGNORECASE))


def listed(reply: str, answer: list[str]) -> Right:
    """The elements in their order and nothing else; leniently: in their order, with others
    between."""
    words = re.findall(r"[\w'-]+", reply)
    rest = iter(words)
    return words == answer, all(element in rest for element in answer)


Allowed = dict[str, dict[str, list[Any]]]  # of a function's arguments; "": it may be left out
SPACES, SIGNS = r"\s", r"[\W_]"  # what does not count in texts, strictly and leniently


def calls(reply: str, answer: list[Allowed]) -> Right:
    """The calls that are allowed and no others, where texts may differ in case and spaces;
    leniently: each of them is among those made, and signs in texts do not count, so that x*3 equals
    x**3, as in BFCL."""
    try:
        rest = [(call["name"], json.loads(call["arguments"])) for call in json.loads(reply)]
    except (ValueError, TypeError, LookupError):
        return WRONG
    with_arguments = [call for call in rest if isinstance(call[1], dict)]
    strict = len(rest) == len(answer) and includes(with_arguments, answer, SPACES)
    return strict, strict or includes(with_arguments, answer, SIGNS)


def includes(calls: list[tuple[str, Any]], answer: list[Allowed], ignored: str) -> bool:
    rest = list(calls)
    for allowed in answer:
        if (
            match := next((match for match in rest if fits(*match, allowed, ignored)), None)
        ) is None:
            return False
        rest.remove(match)
    return True


def fits(name: str, arguments: dict[str, Any], allowed: Allowed, ignored: str) -> bool:
    [(function, values)] = allowed.items()
    needed = {key for key, options in values.items() if "" not in options}
    if name != function.replace(".", "_") or not needed <= arguments.keys() <= values.keys():
        return False
    return all(
        any(equal(value, option, ignored) for option in values[key])
        for key, value in arguments.items()
    )


def equal(value: Any, allowed: Any, ignored: str) -> bool:
    """The fields of an object have several values, too."""
    if isinstance(allowed, str) and isinstance(value, str):
        text, other = (re.sub(ignored, "", text.lower()) for text in (value, allowed))
        return text == other
    if isinstance(allowed, list) and isinstance(value, list):
        pairs = zip(value, allowed, strict=False)
        return len(value) == len(allowed) and all(equal(*pair, ignored) for pair in pairs)
    if isinstance(allowed, dict) and isinstance(value, dict):
        return fits("", value, {"": allowed}, ignored)
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
