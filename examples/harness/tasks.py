"""Repositories with one wrong function; the task describes in words what it should do.

Held-out functions have names that do not occur in training."""

OPERATIONS = {
    "sum": "a + b",
    "difference": "a - b",
    "product": "a * b",
    "larger": "max(a, b)",
    "smaller": "min(a, b)",
}
NAMES = (
    *("add", "calc", "join", "mix", "pick", "fold", "blend", "fuse", "chain", "match", "apply"),
    *("reduce", "solve", "count", "weigh", "score", "rate", "merge", "pair", "link"),
)
HELD_OUT = 3  # the last names


def task(word: str, name: str) -> dict:
    return {
        "id": f"{word}-{name}",
        "input": f"Fix calc.py: {name}(a, b) must return the {word} of a and b.",
        "files": {"calc.py": f"def {name}(a, b): return None\n"},
        "word": word,
        "name": name,
    }


train = [task(word, name) for word in OPERATIONS for name in NAMES[:-HELD_OUT]]
heldout = [task(word, name) for word in OPERATIONS for name in NAMES[-HELD_OUT:]]
