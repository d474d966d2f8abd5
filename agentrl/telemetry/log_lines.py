"""The lines that a run's processes log, on the console."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from agentrl.base.processes import PHASE

LINE = re.compile(r"\S+ \S+ ([A-Z]+) (agentrl[\w.]*): (.*)")  # the format of `log_to_stderr`
IDS = re.compile(r"\S*\d\S*")  # what differs between messages of one kind
LOG_POLL = 0.5  # seconds between reads of log files


def console_level(*, quiet: bool, verbose: bool) -> int:
    """The lowest log level that the console shows."""
    return logging.WARNING if quiet else logging.INFO if verbose else PHASE


@dataclass(slots=True)
class LogFollower:
    """Prints new lines of the log files of a run's processes.

    Lines at PHASE, between INFO and WARNING, describe the run's current phase. Other messages that
    differ in numbers and ids only are printed once, and counted at the end."""

    console: Console
    level: int
    files: Sequence[Path]
    _read: dict[Path, int] = field(default_factory=dict)  # bytes read
    _alike: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)  # and the last

    def __post_init__(self) -> None:
        self._read = {file: file.stat().st_size for file in self.files if file.is_file()}

    async def follow(self) -> None:
        """Print new lines until cancelled, and then once more: the last lines matter most."""
        try:
            while True:
                self.look()
                await asyncio.sleep(LOG_POLL)
        finally:
            self.look()
            for (level, _), (count, last) in self._alike.items():
                if count > len(self.files) and level != "info":  # one of each process is no news
                    self._say(f"{level}: {count - 1} more like it, the last one: {last}")

    def look(self) -> None:
        for file in self.files:
            if not file.is_file():
                continue
            with file.open("rb") as log:
                log.seek(self._read.get(file, 0))
                added = log.read()
            whole, _, _ = added.rpartition(b"\n")
            self._read[file] = self._read.get(file, 0) + len(whole) + bool(whole)
            for line in whole.decode("utf-8", "replace").split("\n"):
                self._print(file, line)

    def _print(self, file: Path, line: str) -> None:
        found = LINE.fullmatch(line)
        levels = logging.getLevelNamesMapping() | {"PHASE": PHASE}
        if found is None or levels.get(found[1], 0) < self.level:
            return
        level, sentence = found[1].lower(), found[3]
        if level != "phase":
            kind = sentence if level == "info" else IDS.sub("#", sentence)
            count, _ = self._alike.get((level, kind), (0, ""))
            self._alike[level, kind] = count + 1, sentence
            if count:
                return
            sentence = f"{level}: {sentence} ({file.name})"
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)
