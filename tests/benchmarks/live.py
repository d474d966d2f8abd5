"""A live run: what kills, updates and decisions do to those who use it meanwhile.

python -m tests.benchmarks.live --json [--only kills latency ...]
python -m tests.benchmarks.live --json --only learning [--seeds 0 1 2] [--parts live ...]

Each measurement is a module `live_NAME`, whose docstring defines it. One that fails is a `problem`,
and the others go on.
"""

from __future__ import annotations

import traceback
from importlib import import_module
from typing import Any

from tests.benchmarks.live_learning import PARTS, SEEDS
from tests.benchmarks.report import arguments, report

NAMES = ("kills", "latency", "promotion", "guard", "learning")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="of learning")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:4], help="of learning")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in given.only:
        options = (given.seeds, given.parts) if name == "learning" else ()
        try:
            figures |= import_module(f"tests.benchmarks.live_{name}").measure(*options)
        except Exception as error:  # noqa: BLE001  (hours of others would be lost)
            traceback.print_exc()
            figures[f"problem {name}"] = repr(error)
    report(figures, as_json=given.json)


if __name__ == "__main__":
    main()
