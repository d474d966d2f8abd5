"""Repositories with one wrong function; the task says in words what it should do.

Held out are functions of other names than those that training has seen."""

OPERATIONS = {
    "sum": "a + b",
    "difference": "a - b",
    "product": "a * b",
    "larger": "max(a, b)",
    "smaller": "min(a, b)",
}
NAMES = ("add", "calc", "join", "mix", "pick", "fold", "blend", "merge", "pair", "link")


def task(word: str, name: str) -> dict:
    return {
        "id": f"{word}-{name}",
        "input": f"Fix calc.py: {name}(a, b) must return the {word} of a and b.",
        "files": {"calc.py": f"def {name}(a, b): return None\n"},
        "word": word,
        "name": name,
    }


train = [task(word, name) for word in OPERATIONS for name in NAMES[:7]]
heldout = [task(word, name) for word in OPERATIONS for name in NAMES[7:]]
