"""Sums; those that contain a seven are held out."""

SUMS = [(a, b) for a in range(2, 10) for b in range(2, 10)]
TASKS = [{"input": f"What is {a} plus {b}?", "answer": a + b} for a, b in SUMS]
heldout = [task for task in TASKS if "7" in str(task["input"])]
train = [task for task in TASKS if task not in heldout]
