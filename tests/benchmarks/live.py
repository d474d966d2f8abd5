"""Live runs: does a candidate get the lane that it deserves, does a run survive, does it learn?

python -m tests.benchmarks.live --json [--only promotion guard]

Each section is a module of its own, whose docstring defines what it measures.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import Any

SECTIONS = {
    "promotion": "tests.benchmarks.live_promotion:promotion",
    "guard": "tests.benchmarks.live_promotion:guard",
}


def measure(sections: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section in sections:
        module, name = SECTIONS[section].split(":")
        found |= getattr(import_module(module), name)()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    result = measure(options.only)
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:<44} {value}")


if __name__ == "__main__":
    main()
