"""Whether `agentrl why` says of a run what became of it.

    python -m tests.benchmarks.why [--json] [--held-out] [--only WORD] [--keep FOLDER]

Forty runs of sixteen fates, each really trained with a tiny model in seconds (`why_runs`), and the
first thing that is said of each. Right is a run of which the first reason is its fate, or "it
learned" if it did; a wrong alarm is any reason that comes before that for a run that learned.
`--held-out`: other runs, which were trained after the rules were written. `--keep`: a folder for
the runs, which are then trained only once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.algorithms import run_record, why
from agentrl.store import open_store
from tests.benchmarks.report import arguments
from tests.benchmarks.why_runs import LEARNED, SAID, Fate, fates, held_out_fates, play


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'out' / 'store.db'}"


async def said_of(url: str) -> list[str]:
    """Everything that is said of a run, the most important first."""
    async with open_store(url, readonly=True) as store:
        (run,) = (await run_record.read(store, "r")).values()
    learned = why.learned(run)
    return [*([learned] if learned else []), *(reason.text for reason in why.reasons(run))]


def judge(fate: Fate, folder: Path) -> dict[str, Any]:
    place, started = folder / fate.place, time.monotonic()
    if not place.is_dir():
        play(fate, place)
    said = asyncio.run(said_of(url_of(place)))
    learned = bool(said) and said[0].startswith(LEARNED)
    first = said[1:] if fate.kind != "learned" and learned else said
    right = bool(first) and first[0].startswith(SAID[fate.kind])
    right &= learned == (fate.learns or fate.kind == "learned")
    return {
        "kind": fate.kind, "name": fate.name, "right": right, "said": said, "learned": learned,
        "alarms": said[1:] if fate.kind == "learned" else [],
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    learned = [row for row in rows if row["kind"] == "learned"]
    return {
        "runs": len(rows),
        "right": sum(row["right"] for row in rows),
        "learned": len(learned),
        # Of runs that learned: what else is said of them, which is true where rollouts fail.
        "wrong_alarms": sum(
            not alarm.startswith("rollouts fail") for row in learned for alarm in row["alarms"]
        )
        + sum(not row["learned"] for row in learned),
        "wrongly_learned": sum(row["learned"] and not row["right"] for row in rows),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for fate in held_out_fates() if asked.held_out else fates():
            if asked.only in f"{fate.kind} {fate.name}":
                rows.append(judge(fate, asked.keep or Path(temporary)))
                mark = "right" if rows[-1]["right"] else "WRONG"
                said = "; ".join(rows[-1]["said"][:2]) or "nothing"
                print(f"{mark} {fate.kind}, {fate.name} ({rows[-1]['seconds']} s): {said}",
                      file=sys.stderr)  # fmt: skip
    found = summary(rows)
    if asked.json:
        print(json.dumps(found | {"by_run": rows}))
        return
    for key, value in found.items():
        print(f"{key:<24}{value:>6}")


if __name__ == "__main__":
    main()
