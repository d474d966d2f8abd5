"""Sums of two numbers; those whose first number is a multiple of ten are held out."""

SUMS = [
    {"id": f"{a}+{b}", "input": f"{a} + {b}", "answer": str(a + b)}
    for a in range(11, 100)
    for b in range(11, 100, 7)
]
heldout = [task for task in SUMS if task["input"].split()[0].endswith("0")]
train = [task for task in SUMS if task not in heldout]
