"""How fast is the store, how large, and what does it lose? Each figure with a baseline beside it.

python -m tests.benchmarks.store --json [--quick] [--only SECTION ...] [--postgres URL]

A section is a module `tests.benchmarks.store_<section>` with `measure(quick: bool)`, which returns
figures by name; `quick` is smaller in every dimension and proves only that the section works.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from importlib.util import find_spec

from tests.benchmarks.report import arguments, report

Figures = dict[str, float | int | str]
SECTIONS = (
    "transitions",
    "claim",
    "bytes",
    "restart",
    "kill9",
    "http",
    "memory",
    "credit",
    "runners",
)


def measure(section: str, *, quick: bool) -> Figures:
    started = time.monotonic()
    figures: Figures = import_module(f"tests.benchmarks.store_{section}").measure(quick)
    print(f"{section}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return figures


def main() -> None:
    known = [name for name in SECTIONS if find_spec(f"tests.benchmarks.store_{name}")]
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="SECTION")
    parser.add_argument("--postgres", metavar="URL", help="measure many processes on it, only")
    options = parser.parse_args()
    if options.postgres:
        from tests.benchmarks import store_processes

        result = store_processes.measure(options.quick, options.postgres)
        print(json.dumps(result) if options.json else result)
        return
    result = {name: measure(name, quick=options.quick) for name in options.only}
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
