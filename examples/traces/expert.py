"""The recorded model: a scripted expert that makes mistakes, and what its reviewers say."""

import random
import re

from agent import CLERK, INTAKE, WRITER
from orders import PROBLEMS, decision_of

DECISIONS = {
    "refund": "We pay you back for order {}.",
    "resend": "We send you order {} again.",
    "wait": "Please wait a few more days for order {}.",
}
FIND = {text: problem for problem, texts in PROBLEMS.items() for text in texts}


def answer(system: str, text: str, slips: random.Random | None = None, rate: float = 0.0) -> str:
    """What the expert says to a node's prompt; with a slip at that rate."""
    wrong = slips is not None and slips.random() < rate
    if system == INTAKE:
        order = re.findall(r"\d+", text)[-1]
        problem = next(found for words, found in FIND.items() if words in text)
        if wrong:
            problem = next(one for one in PROBLEMS if one != problem)
        return f"{order}: {problem}"
    if system == CLERK:
        case, record = text.split("\n")
        right = decision_of(case.partition(": ")[2], record)
        return next(one for one in DECISIONS if one != right) if wrong else right
    assert system == WRITER
    case, decision = text.split("\n")
    order = case.partition(":")[0]
    return DECISIONS[decision].format("0000" if wrong else order)
