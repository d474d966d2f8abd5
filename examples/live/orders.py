"""What the shop knows: its orders, and what a good answer to each kind of request is."""

from __future__ import annotations

import random

ORDERS = [str(number) for number in random.Random("orders").sample(range(100, 1000), 60)]
STATUS = ("on its way", "here on Monday", "being packed", "delivered")


def status(order: str) -> str:
    """The result of the tool `look_up_order`."""
    return f"order {order}: {STATUS[int(order) % 4]}" if order in ORDERS else f"no order {order}"


def answer(kind: str, order: str) -> str:
    """How the last message to the customer has to end."""
    return {
        "where": f"Your {status(order)}.",
        "return": f"I take back your order {order}.",
        "person": "A colleague will call you.",
        "hours": "The shop is open from 9 to 5.",
    }[kind]
