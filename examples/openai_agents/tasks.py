"""Amounts to convert; those from pounds are held out."""

from agent import RATES

TASKS = [
    {
        "id": f"{amount} {source} {target}",
        "input": f"How much is {amount} {source} in {target}?",
        "answer": f"{amount * RATES[target] / RATES[source]:.2f}",
    }
    for source in RATES
    for target in RATES
    if source != target
    for amount in (2, 5, 20, 30, 100)
]
heldout = [task for task in TASKS if " GBP in " in task["input"]]
train = [task for task in TASKS if task not in heldout]
