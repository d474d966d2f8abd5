"""The store of `chaos`: `agentrl store serve` with a clock that is as many seconds ahead as a file
says: python -m tests.benchmarks.chaos_store HOST PORT FILE, where the database and keys are."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from agentrl.store.http.keys import KeyFile
from agentrl.store.http.serve import run
from agentrl.store.sqlite import Location, SqliteStore


def serve(host: str, port: str, offset: str) -> None:
    def now() -> float:
        return time.time() + float(Path(offset).read_text())

    location = Location.parse("sqlite:///store.db")
    keys = KeyFile(Path("keys"))
    run(lambda: SqliteStore(location, clock=now), host, int(port), keys)


if __name__ == "__main__":
    serve(*sys.argv[1:])
