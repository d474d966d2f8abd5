"""The hidden test: it calls the function with unseen numbers in a fresh copy of the repository with
the agent's changes."""

from tasks import OPERATIONS

TEST = """from calc import {name}

for a, b in ((7, 3), (-2, 9), (5, 5)):
    assert {name}(a, b) == {operation}, (a, b)
print("passed", "{word}")
"""


async def verify(task, workspace) -> float:
    test = TEST.format(operation=OPERATIONS[task["word"]], **task)
    copy = await workspace.fresh({"hidden_test.py": test})
    try:
        done = await copy.run(["python3", "hidden_test.py"], timeout=10)
    except TimeoutError:
        return 0.0
    return float(done.status == 0 and done.stdout.strip() == f"passed {task['word']}")
