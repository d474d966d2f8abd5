"""SAGE's rewards, arXiv 2603.15255, of numbers from 0 to 1.

The paper's weights of planner and solver are not published: those here are ours. The critic is paid
for its format alone, as nothing says what else; that, too, is our reading.
"""

from __future__ import annotations

GOOD_QUESTION, USEFUL_PLAN = 0.7, 0.3  # the gates
PLAN, PLAN_FORMAT = 0.5, 0.5  # ours
FOLLOWED, CORRECT, ANSWER_FORMAT = 0.2, 0.6, 0.2  # ours


def challenger(quality: float, solved: float | None, form: float) -> float:
    """`solved`: mean correctness of the solvers; None where the question has no known answer.

    Hard questions are paid for only where the question is good and has an answer: otherwise one
    that nobody can solve would be the best of all."""
    if quality < GOOD_QUESTION or solved is None:
        return (quality + form) / 2
    return (quality + (1 - solved) + form) / 3


def planner(use: float, form: float) -> float:
    return PLAN * use + PLAN_FORMAT * form


def solver(use: float, correct: float, form: float) -> float:
    """A plan that was dropped, as it was of no use, has no share in the answer."""
    followed = use if use >= USEFUL_PLAN else 0.0
    return FOLLOWED * followed + CORRECT * correct + ANSWER_FORMAT * form


def critic(form: float) -> float:
    return form
