"""The shop: its orders, its rules, and messages of its customers."""

import random
import re

THINGS = ("lamp", "rug", "vase", "chair", "clock", "table", "mirror", "bowl", "desk", "plate")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jan")
PROBLEMS = {
    "late": ("has not arrived yet", "is still not here", "should have come last week"),
    "broken": ("came in pieces", "has a crack", "arrived smashed"),
    "wrong": ("is not what I ordered", "is another colour than I chose", "is the wrong size"),
}


def record_of(case: str) -> str:
    """What the shop knows of the order in a case: days since it was sent, and stock."""
    found = re.search(r"\d+", case)
    if not found:
        return "no such order"
    drawn = random.Random(int(found[0]))
    return f"sent {drawn.choice((3, 5, 20, 30))} days ago, {drawn.choice(('in stock', 'sold out'))}"


def decision_of(problem: str, record: str) -> str:
    """The shop's rule."""
    if problem == "late" and record.startswith(("sent 3 ", "sent 5 ")):
        return "wait"
    return "resend" if "in stock" in record else "refund"


def message(drawn: random.Random) -> tuple[str, str, str]:
    """A customer's message, with the order and the problem that it is about."""
    order, problem = str(drawn.randint(1000, 9999)), drawn.choice([*PROBLEMS])
    thing, name = drawn.choice(THINGS), drawn.choice(NAMES)
    text = f"Hello, this is {name}. The {thing} of order {order} {drawn.choice(PROBLEMS[problem])}."
    return text, order, problem
