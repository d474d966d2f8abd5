"""Tools that answer as they did in recorded traces, for agents whose real tools cannot be run.

A call that was recorded gets the recorded answer, the most frequent of several. Any other call gets
the answer of the nearest recorded call, after a line that says so, and a warning is logged; a tool
without recordings answers that there are none. So a policy never learns from an answer that looks
recorded but is not.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import msgspec

from agentrl.core.data_files import read_rows

log = logging.getLogger("agentrl.recorded")
MAX_COMPARED = 2000  # recorded calls that are compared with an unrecorded one


class RecordedTools:
    """The recorded answers in a file with rows {"name", "arguments", "result", "times"}; its rows
    {"function": ...} are `definitions`. Raises ConfigError for a file that cannot be read."""

    def __init__(self, path: str | Path) -> None:
        self.definitions: list[dict[str, Any]] = []  # in the format of chat completions
        self._answers: dict[str, dict[str, Counter[str]]] = defaultdict(
            lambda: defaultdict(Counter)
        )
        self.exact = self.nearest = self.unknown = 0  # number of calls answered in each way
        for _, row in read_rows(str(path)):
            if "function" in row:
                self.definitions.append(row)
            else:
                key, result = _key(row.get("arguments")), row.get("result")
                text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
                self._answers[str(row["name"])][key][text] += int(row.get("times") or 1)

    def call(self, name: str, arguments: Any) -> str:
        """The answer to a call. arguments: an object, or its JSON."""
        recorded, key = self._answers.get(name), _key(arguments)
        if not recorded:
            self.unknown += 1
            log.warning("no call of the tool %s was recorded", name)
            return f"[not recorded: no call of {name} is in the traces]"
        if key in recorded:
            self.exact += 1
            return recorded[key].most_common(1)[0][0]
        self.nearest += 1
        near = _nearest([*recorded][:MAX_COMPARED], key)
        log.warning("%s(%s) was not recorded; answered as %s(%s)", name, key, name, near)
        answer = recorded[near].most_common(1)[0][0]
        return f"[not recorded: this is the answer to {name}({near})]\n{answer}"

    def function(self, name: str) -> Callable[..., str]:
        """A tool as a function of its named arguments, for frameworks that take functions."""

        def tool(**arguments: Any) -> str:
            return self.call(name, arguments)

        function: dict[str, Any] = next(
            (
                definition["function"]
                for definition in self.definitions
                if definition["function"]["name"] == name
            ),
            {},
        )
        tool.__name__, tool.__doc__ = name, str(function.get("description") or "")
        return tool


def _nearest(texts: list[str], text: str) -> str:
    """The most similar text. Fast bounds avoid most comparisons."""
    matcher, nearest, best = SequenceMatcher(None, "", text), texts[0], 0.0
    for candidate in texts:
        matcher.set_seq1(candidate)
        bound = min(matcher.real_quick_ratio(), matcher.quick_ratio())
        if bound > best and (ratio := matcher.ratio()) > best:
            nearest, best = candidate, ratio
    return nearest


def _key(arguments: Any) -> str:
    """Arguments as a text that does not depend on the order of fields or on spaces."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            return " ".join(arguments.split())
    return msgspec.json.encode(arguments, order="sorted").decode()
