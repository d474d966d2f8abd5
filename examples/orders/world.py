"""Orders to write in one line, by rules that the initial prompts do not contain, and scripted
models that follow only the rules in their instructions."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

COUNTRIES = {"Germany": "DE", "Japan": "JP", "Kenya": "KE", "Peru": "PE", "Norway": "NO"}
MONTHS = "January February March April May June July August September October November December"
MONTH = MONTHS.split()
SEED = {
    "extractor": "Extract the fields of the order.",
    "formatter": "Write the fields in one line.",
}
RULES = {
    "iso": ("extractor", "Give the ISO country code."),
    "date": ("extractor", "Write dates as YYYY-MM-DD."),
    "cents": ("formatter", "Write amounts in cents."),
    "sep": ("formatter", "Separate with a semicolon."),
    "end": ("formatter", "End with a hash sign."),
}
NOISE = ["Be verbose.", "Think like a pirate.", "Use a friendly tone.", "Mention the weather."]
LIMIT = 260  # characters of instructions that the models read
PARTS = {
    "place": ["country"], "time": ["date"], "money": ["amount"],
    "all": ["country", "date", "amount"],
}  # fmt: skip


def make(n: int, seed: str) -> list[dict[str, Any]]:
    """Random tasks."""
    rng, found = random.Random(seed), []
    for number in range(n):
        parts = PARTS[rng.choice(["place", "place", "time", "money", "all"])]
        country, month = rng.choice(list(COUNTRIES)), rng.randrange(12)
        day, cents = rng.randrange(1, 29), rng.randrange(100, 99999)
        said = {
            "country": f" from {country}",
            "date": f" on {day} {MONTH[month]} 2024",
            "amount": f" of {cents / 100:.2f} EUR",
        }
        expected = {
            "iso": COUNTRIES[country],
            "date": f"2024-{month + 1:02d}-{day:02d}",
            "cents": str(cents),
        }
        text = "order" + "".join(said[part] for part in parts)
        task = {"id": f"{seed}-{number}", "input": text, "expected": expected, "parts": parts}
        found.append(task)
    return found


# -- the models ------------------------------------------------------------------------------------


def follows(system: str, sentence: str) -> bool:
    return sentence in system[:LIMIT]


def extractor(system: str, text: str) -> str:
    country = re.search(r"from (\w+)", text)
    date, amount = re.search(r"on (\d+) (\w+) 2024", text), re.search(r"of ([\d.]+) EUR", text)
    found = []
    if country:
        iso = follows(system, RULES["iso"][1])
        found.append(COUNTRIES[country[1]] if iso else country[1])
    if date:
        day = f"2024-{MONTH.index(date[2]) + 1:02d}-{int(date[1]):02d}"
        found.append(day if follows(system, RULES["date"][1]) else f"{date[1]} {date[2]} 2024")
    if amount:
        found.append(f"{amount[1]} EUR")
    if any(follows(system, noise) for noise in NOISE):
        found.append("well, well")
    return "|".join(found)


def formatter(system: str, text: str) -> str:
    fields = text.split("|")
    if follows(system, RULES["cents"][1]):
        fields = [str(round(float(x[:-4]) * 100)) if x.endswith(" EUR") else x for x in fields]
    line = (";" if follows(system, RULES["sep"][1]) else ", ").join(fields)
    line += " arr" if any(follows(system, noise) for noise in NOISE) else ""
    return line + ("#" if follows(system, RULES["end"][1]) else "")


MODELS: dict[str, Callable[[str, str], str]] = {"extractor": extractor, "formatter": formatter}


# -- the score -------------------------------------------------------------------------------------


def checks(task: dict[str, Any], result: str) -> dict[str, float]:
    """Rule -> 1 if an answer follows it, else 0, for the rules that apply."""
    parts, expected, found = task["parts"], task["expected"], {}
    written = [field.strip() for field in re.split("[;,]", result.removesuffix("#"))]
    fields = dict(zip(parts, written, strict=True)) if len(parts) == len(written) else {}
    for part, rule in (("country", "iso"), ("date", "date"), ("amount", "cents")):
        if part in parts:
            found[rule] = fields.get(part) == expected[rule]
    if len(parts) > 1:
        found["sep"] = result.count(";") == len(parts) - 1
    clean = "well" not in result and "arr" not in result
    found = {rule: kept and clean for rule, kept in found.items()}
    return {rule: float(kept) for rule, kept in (found | {"end": result.endswith("#")}).items()}


def feedback(role: str, kept: dict[str, float], said: str) -> str:
    """A text about the mistakes in a role's answer."""
    bad = [rule for rule, value in kept.items() if not value and RULES[rule][0] == role]
    words = [f"rule {rule} is not kept." for rule in bad]
    noisy = ("well" if role == "extractor" else "arr") in said
    return " ".join(words + (["there is chatter in the answer."] if noisy else [])) or "fine."


def reflect(question: str, seed: int) -> str:
    """A scripted reflector: it fixes one mistake, and sometimes adds nonsense or drops a
    sentence."""
    if question.rstrip().endswith("these faults arose."):
        return " ".join(re.findall(r"rule \w+ is not kept\.|there is chatter[^.]*\.", question))
    rng = random.Random(f"{seed}/{question}")
    now = re.search(r"```\n?(.*?)\n?```", question, re.DOTALL)
    shown = question.split("```")[2]
    bad = re.findall(r"rule (\w+) is not kept", shown)
    return f"```\n{mutated(now[1] if now else '', bad, 'chatter' in shown, rng)}\n```"


def mutated(now: str, bad: list[str], chatter: bool, rng: random.Random) -> str:
    sentences = [sentence.strip() for sentence in re.findall(r"[^.]+\.", now)]
    if chatter and any(s in NOISE for s in sentences) and rng.random() < 0.8:
        sentences = [s for s in sentences if s not in NOISE]
    elif rng.random() < 0.35:
        sentences.append(rng.choice(NOISE))
    elif bad:
        sentences.append(RULES[rng.choice(bad)][1])
    if rng.random() < 0.15 and len(sentences) > 1:
        sentences.pop(rng.randrange(len(sentences)))
    return " ".join(dict.fromkeys(sentences)) or now
