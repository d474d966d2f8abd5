"""Four roles of one model (SAGE, arXiv 2603.15255): a challenger invents a walk on a board from an
example, a planner makes its first move, solvers answer where it ends, a critic rates walk and plan.

With a task `{"seed": ...}` the agent first invents a question, with `{"question": ...}` it only
answers. The model's name is the role, so any server, or one per role, can answer.
"""

from __future__ import annotations

import asyncio

from board import parse
from openai import AsyncOpenAI

PROMPTS = {
    "challenger": "Invent a longer walk than this one.",
    "planner": "Make the first move.",
    "solver": "Where does it end?",
    "critic": "Rate this from 0 to 9.",
}
GOOD_QUESTION, USEFUL_PLAN = 0.7, 0.3  # the gates
ATTEMPTS = 4  # of the solver per question

client = AsyncOpenAI()


async def agent(task: dict[str, str]) -> dict[str, object]:
    question = task.get("question") or await ask("challenger", task["seed"])
    quality = rating(await ask("critic", f"question {question}"))
    asked: dict[str, object] = {"question": question, "quality": quality}
    if "question" not in task and (quality < GOOD_QUESTION or parse(question) is None):
        return asked
    plan = await ask("planner", question)
    use = rating(await ask("critic", f"plan {question} -> {plan}"))
    known = f"{question} -> {plan}" if use >= USEFUL_PLAN else question
    answers = await asyncio.gather(*(ask("solver", known) for _ in range(ATTEMPTS)))
    return asked | {"plan": plan, "use": use, "answers": answers}


async def ask(role: str, text: str) -> str:
    messages = [{"role": "system", "content": PROMPTS[role]}, {"role": "user", "content": text}]
    completion = await client.chat.completions.create(model=role, messages=messages)
    return (completion.choices[0].message.content or "").strip()


def rating(text: str) -> float:
    """A rating as a number from 0 to 1; 0 if the text is not a rating."""
    return int(text) / 9 if len(text) == 1 and text in "0123456789" else 0.0
