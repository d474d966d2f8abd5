"""What customers of the shop say, in many words; every order number ends a sentence."""

from __future__ import annotations

import random

SHARES = {"where": 0.35, "return": 0.3, "person": 0.2, "hours": 0.15}  # of the kinds of requests
REQUESTS = {
    "where": (
        "Where is my order {}?", "When do I get order {}?", "Did you ship order {}?",
        "I still wait for order {}.", "Track order {}.", "What is the status of order {}?",
        "Late again: order {}.", "Any news on order {}?",
    ),
    "return": (
        "I want to send back order {}.", "It does not fit: order {}.",
        "I want a refund for order {}.", "Please take back order {}.",
        "It came broken: order {}.", "I do not like my order {}.", "How do I return order {}?",
        "The colour is wrong in order {}.",
    ),
    "person": (
        "Let me talk to a person about order {}.", "Call me about order {}.",
        "You charged me twice for order {}.", "I have a legal question on order {}.",
        "Change the address of order {}.", "Your manager must see order {}.",
        "The courier was rude with order {}.", "I need an invoice for order {}.",
    ),
    "hours": (
        "Can I pick up on Sunday order {}?", "Until when can I collect order {}?",
        "Are you open for order {}?", "At what time may I fetch order {}?",
        "Do you open tomorrow for order {}?", "Do you close at noon? I fetch order {}.",
        "I come by tonight for order {}.", "On which days can I fetch order {}?",
    ),
}  # fmt: skip
GREETINGS = ("", "Hello. ", "Hi, ", "Good morning. ", "Listen. ")
ENDINGS = ("", " Thanks.", " Please hurry.", " I am annoyed.")
THANKS = ("Thanks, that helps.", "Perfect.", "Great, thank you.")
AGAIN = ("That is not what I asked.", "No, that is wrong.")  # and then the request once more
COMPLAINTS = (*AGAIN, "Useless.")


def kind_of(rng: random.Random) -> str:
    return rng.choices([*SHARES], [*SHARES.values()])[0]


def request(kind: str, order: str, rng: random.Random) -> str:
    """The first message of a customer."""
    return rng.choice(GREETINGS) + rng.choice(REQUESTS[kind]).format(order) + rng.choice(ENDINGS)


def request_again(kind: str, order: str, rng: random.Random) -> str:
    return f"{rng.choice(AGAIN)} {rng.choice(REQUESTS[kind]).format(order)}"
