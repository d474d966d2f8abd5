"""What differs from machine to machine and from run to run in printed text, taken out."""

from __future__ import annotations

import re
from pathlib import Path

from tests.golden.access import ROOT

DRAWN = re.compile(r"\b[0-9a-f]{32}\b")
SECONDS = re.compile(r"\b\d+\.\d\d s\b")
CLOCK = re.compile(r"\b1[5-9]\d{8}\.\d+")  # unix seconds
PORT = re.compile(r"(127\.0\.0\.1|localhost):\d+")


def normal(text: str, folder: Path | None = None) -> str:
    """The text with names for folders, drawn ids and ports, without spaces at ends of lines."""
    for path, name in ((folder, "FOLDER"), (ROOT, "ROOT")):
        if path is not None:
            text = text.replace(str(path.resolve()), name).replace(str(path), name)
    text = PORT.sub(r"\1:PORT", DRAWN.sub("ID", text))
    text = SECONDS.sub("0.00 s", CLOCK.sub("0.0", text))
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
