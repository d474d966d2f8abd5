"""Golden files: one JSON object a line, with sorted keys, so that a change reads as a diff.

A module of golden cases has a function that computes them, a test that compares them with its file,
and `python -m tests.golden.NAME --write`, which writes the file anew. The commit that does so says
why what was recorded may change.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Case = dict[str, Any]
RELATIVE, ABSOLUTE = 1e-6, 1e-9


def read(name: str) -> dict[str, Case]:
    """The cases of a golden file, by name."""
    lines = (HERE / f"{name}.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    return {case.pop("case"): case for case in map(json.loads, lines)}


def write(name: str, cases: Iterable[tuple[str, Case]]) -> None:
    lines = [
        json.dumps(
            {"case": key, **rounded(case)},
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        )
        for key, case in cases
    ]
    (HERE / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def rounded(value: Any) -> Any:
    """Floats with eight digits, and null for NaN."""
    if isinstance(value, float):
        return None if math.isnan(value) else short(value)
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return value


def short(value: float) -> float | int:
    number = float(f"{value:.8g}")
    return 0 if abs(number) < ABSOLUTE / 10 else int(number) if number.is_integer() else number


def differences(
    expected: Any, found: Any, relative: float = RELATIVE, at: str = ""
) -> Iterator[str]:
    """Where two values differ, as lines of text."""
    numbers = (int, float)
    if isinstance(expected, bool) or isinstance(found, bool):
        if expected is not found:
            yield f"{at}: {expected!r} became {found!r}"
    elif isinstance(expected, numbers) and isinstance(found, numbers):
        if not math.isclose(
            expected, found, rel_tol=relative, abs_tol=max(ABSOLUTE, relative / 1e3)
        ):
            yield f"{at}: {expected!r} became {found!r}"
    elif isinstance(expected, dict) and isinstance(found, dict):
        for key in expected.keys() | found.keys():
            if (key in expected) != (key in found):
                yield f"{at}.{key}: {'gone' if key in expected else 'new'}"
            else:
                yield from differences(expected[key], found[key], relative, f"{at}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{at}: {len(expected)} items became {len(found)}"
        for number, pair in enumerate(zip(expected, found, strict=False)):
            yield from differences(*pair, relative, f"{at}[{number}]")
    elif isinstance(expected, str) and isinstance(found, str):
        if expected != found:
            yield from different_text(expected, found, at)
    elif expected != found:
        yield f"{at}: {expected!r} became {found!r}"


def different_text(expected: str, found: str, at: str) -> Iterator[str]:
    """The first lines that differ."""
    before, after = expected.splitlines(), found.splitlines()
    for number in range(max(len(before), len(after))):
        old, new = (lines[number : number + 1] for lines in (before, after))
        if old != new:
            yield f"{at}, line {number + 1}: {old} became {new}"
            return
    yield f"{at}: ends of lines differ"


def check(
    name: str, expected: Case | None, found: Case, relative: float = RELATIVE, most: int = 8
) -> None:
    """Fail unless a case is what its golden file says."""
    assert expected is not None, f"{name}: no such case in the golden file; write it"
    lines = list(differences(expected, rounded(found), relative))
    assert not lines, "\n".join([name, *lines[:most]])


def check_all(expected: dict[str, Case], found: dict[str, Case]) -> None:
    """Fail with every case that is not what its golden file says."""
    lines = [
        line
        for name, case in expected.items()
        for line in islice(differences(case, rounded(found[name]), at=name), 8)
    ]
    assert not lines, "\n".join(lines)


def main(name: str, cases: Callable[[], Iterable[tuple[str, Case]]]) -> None:
    """The command of a module of golden cases."""
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(f"usage: python -m tests.golden.{name} --write")
    write(name, cases())
