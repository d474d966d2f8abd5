"""A live run: what kills, updates and decisions do to those who use it meanwhile.

python -m tests.benchmarks.live --json [--only kills latency ...]

Each measurement is a module `live_NAME`, whose docstring defines it.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module

NAMES = ("kills", "latency", "promotion", "guard", "learning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    given = parser.parse_args()
    figures = {}
    for name in given.only:
        figures |= import_module(f"tests.benchmarks.live_{name}").measure()
    if given.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:40} {value}")


if __name__ == "__main__":
    main()
