"""Requests of real harnesses without a word of their makers: the structure stays, text is filler.

`fill` keeps keys, types, roles, names of tools and of their arguments, and the phrases that rules
of presets look for; every other text becomes made-up words, different ones for different texts.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

SYLLABLES = [a + b for a in "bdklmn" for b in "aeio"]
TEXTS = {"text", "content", "description", "output", "title", "thought", "summary_text"}
WORDS = 45  # of a text at most, more than 200 characters
DESCRIPTION = 3  # of a tool or argument
NAME = re.compile(r"[\w.,:;=+/@$*{}\[\]()<>|^&?!#-]{1,48}")  # no text: one word of a protocol
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{40,64}\b")
# What the rules of presets look for in a text.
PHRASES = (
    "x-anthropic-billing-header:",
    "You are a general-purpose agent",
    "You are an expert software engineer that generates",
    "CRITICAL: Respond with TEXT ONLY",
)


def fill(value: Any, key: str = "") -> Any:
    """`value` of a request with fillers; `key` is the one it is found under."""
    if isinstance(value, dict):
        return {name: fill(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [fill(inner, key) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    if key == "arguments":  # of a tool call that the scripted model wrote
        return value
    if key != "text" and value.lstrip()[:1] in "{[" and is_json(value):  # JSON in JSON
        return json.dumps(fill(json.loads(value)), separators=(",", ":"))
    if key not in TEXTS and NAME.fullmatch(value):
        return UUID.sub(_id, value)
    return words(value, DESCRIPTION if key == "description" else WORDS)


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except ValueError:
        return False


def words(text: str, most: int) -> str:
    """As many words as the text has, `most` at most, the same for the same text."""
    kept = next((phrase for phrase in PHRASES if text.startswith(phrase)), "")
    digest = hashlib.sha256(text.encode()).digest() * 8
    pairs = list(zip(digest[::2], digest[1::2], strict=True))[: min(most, len(text.split()))]
    said = " ".join(SYLLABLES[a % 24] + SYLLABLES[b % 24] for a, b in pairs)
    return f"{kept} {said}" if kept else said


def _id(found: re.Match[str]) -> str:
    return hashlib.sha256(found[0].encode()).hexdigest()[:8]
