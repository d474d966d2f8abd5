"""Do the clients that people use continue exactly? Each plays a script through the real gateway.

python -m tests.benchmarks.clients --json

`exact_share` is over the cells (client, case, streamed or not) in which the client sends back what
it was given. `silent` counts cells in which the policy reads something else than the client sent
and neither the console nor the call's `ignored` says so. `--page` writes docs/reference/clients.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.benchmarks.clients.install import FOLDER, clients
from tests.benchmarks.clients.judge import CLIENT, EXACT, GATEWAY, NONE
from tests.benchmarks.clients.page import PAGE, Row, measured, write


def figures(rows: dict[str, list[Row]]) -> dict[str, float]:
    cells = [cell for each in rows.values() for row in each for cell in row.cells]
    found = Counter(cell.verdict for cell in cells)
    return {
        "clients": len(rows),
        "cells": len(cells),
        "exact": found[EXACT],
        "exact_share": round(found[EXACT] / max(1, found[EXACT] + found[GATEWAY]), 4),
        "not_sent_back": found[CLIENT],
        "never_asked_again": found[NONE],
        "silent": sum(bool(cell.silent) for cell in cells),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("names", nargs="*", help="of clients; all of them by default")
    options = parser.parse_args()
    chosen = clients(options.names)
    failed = {
        client.name: (log.read_text().strip().splitlines() or ["no message"])[-1]
        if (log := client.folder / "failure.txt").exists()
        else "`make clients` has not installed it"
        for client in chosen
        if not client.installed
    }
    if len(failed) == len(chosen):
        raise SystemExit(f"no client is in {FOLDER}: run `make clients`, which installs them")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
        asked = {
            client.name: [pool.submit(measured, client.name, streamed) for streamed in client.ways]
            for client in chosen
            if client.name not in failed
        }
        rows = {name: [one.result() for one in each] for name, each in asked.items()}
    if options.page:
        PAGE.write_text(write(rows, chosen, failed), encoding="utf-8")
    found = figures(rows)
    if options.json:
        print(json.dumps(found))
        return
    for name, each in rows.items():
        for row in each:
            how = "streamed" if row.streamed else "whole"
            print(f"{name} {how}: {dict(Counter(cell.verdict for cell in row.cells))}")
            for cell in row.cells:
                if cell.verdict != EXACT or cell.silent:
                    print(f"  {cell.case} {cell.verdict}: {cell.reason[:300]} {cell.silent}")
    print(found)


if __name__ == "__main__":
    main()
