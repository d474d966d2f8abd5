"""A run over several machines: store, learner and runners, each with an address of its own.

They have in common what the network gives them: the files of a runner's agent are its own copies.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.core.processes import USER_ERROR
from tests.system.conftest import ASKS
from tests.system.machines import Machine, Network, network, possible

KEYS = {"admin": "admin-" + "a" * 40, "runner": "runner-" + "r" * 40}
POLICY_KEY = "policy-" + "p" * 40
STEPS, GROUPS, SIZE = 24, 2, 4
PORT = 7411
AGENTRL = [sys.executable, "-m", "agentrl"]
FILES = ("agent.py", "verifier.py")

pytestmark = pytest.mark.skipif(not possible(), reason="users have no network namespaces here")


@pytest.fixture
def lan() -> Iterator[Network]:
    with network() as made:
        yield made


class Cluster:
    """The machines of one run, each with a folder of its own."""

    def __init__(self, lan: Network, run_folder: Path, folder: Path) -> None:
        self.lan, self.run_folder, self.folder = lan, run_folder, folder
        self.store, self.learner = lan.machine(), lan.machine()
        self.url = f"http://{self.store.address}:{PORT}"
        self.database = self._folder("store") / "store.db"

    def serve(self) -> subprocess.Popen[bytes]:
        folder = self.database.parent
        (folder / "keys").write_text("".join(f"{scope}:{key}\n" for scope, key in KEYS.items()))
        listening = ["--host", self.store.address, "--port", str(PORT), "--keys", "keys"]
        return self.store.start([*AGENTRL, "store", "serve", "store.db", *listening], folder)

    def train(self) -> subprocess.Popen[bytes]:
        settings = {
            "store": self.url, "steps": STEPS, "runner.processes": 0,
            "engine.host": self.learner.address, "engine.key_env": "POLICY_KEY",
            "algorithm.groups": GROUPS,
            "algorithm.group_size": SIZE, "eval.tasks": 2,
        }  # fmt: skip
        overrides = [f"{key}={value}" for key, value in settings.items()]
        command = [*AGENTRL, "train", "run.toml", *overrides]
        secrets = {"AGENTRL_STORE_KEY": KEYS["admin"], "POLICY_KEY": POLICY_KEY}
        return self.learner.start(command, self.run_folder, **secrets)

    def runner(
        self, name: str, key: str = KEYS["runner"]
    ) -> tuple[Machine, subprocess.Popen[bytes]]:
        machine, folder = self.lan.machine(), self._folder(name)
        for file in FILES:
            shutil.copy(self.run_folder / file, folder)
        joining = ["--store", self.url, "--key", key, "--run", "tiny", "--root", "."]
        command = [*AGENTRL, "runner", "start", *joining]
        return machine, machine.start(command, folder, POLICY_KEY=POLICY_KEY)

    def asked(self, query: str) -> list[tuple[object, ...]]:
        """Rows of a query; none before there is a store."""
        if not self.database.exists():
            return []
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as connection:
            try:
                return connection.execute(query).fetchall()
            except sqlite3.OperationalError:
                return []  # the schema is not there yet

    def workers(self) -> set[object]:
        """Runners that have finished a rollout."""
        return {
            row[0] for row in self.asked("select runner from attempts where state = 'succeeded'")
        }

    def steps(self) -> int:
        return len(self.asked("select step from steps where committed"))

    def words(self) -> str:
        """What all machines said last, for whoever reads why the test failed."""
        logs = [*self.folder.glob("*/log"), *self.run_folder.glob("out/logs/*.log")]
        logs.append(self.run_folder / "log")
        return "\n".join(f"{log}: {log.read_text()[-2000:]}" for log in logs if log.exists())

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runners_on_other_machines_may_die_vanish_and_join(
    lan: Network, run_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (run_folder / "agent.py").write_text(ASKS.format(times=1))  # which starts in a moment
    cluster = Cluster(lan, run_folder, tmp_path_factory.mktemp("machines"))
    cluster.serve()
    training = cluster.train()

    def until(true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 100
        while not true():
            assert training.poll() is None, cluster.words()
            assert time.monotonic() < deadline, cluster.words()
            time.sleep(0.05)

    (_, first), (second, _) = cluster.runner("first"), cluster.runner("second")
    _, stranger = cluster.runner("stranger", key="runner-" + "s" * 40)
    until(lambda: len(cluster.workers()) == 2 and cluster.steps() >= 2)

    first.kill()  # in the middle of whatever it does
    reached = cluster.steps()
    until(lambda: cluster.steps() >= reached + 2)

    second.plug(connected=False)
    cluster.runner("third")
    until(lambda: len(cluster.workers()) == 3)
    reached = cluster.steps()
    until(lambda: cluster.steps() >= reached + 2)
    second.plug(connected=True)

    assert training.wait(timeout=150) == 0, cluster.words()
    assert cluster.steps() == STEPS
    trained = cluster.asked(
        "select trained_step, count(*) from groups where purpose = 'train' group by 1"
    )
    assert trained == [(step, GROUPS) for step in range(STEPS)]
    states = cluster.asked(
        "select state, count(*) from rollouts where purpose = 'train' group by 1"
    )
    assert states == [("succeeded", STEPS * GROUPS * SIZE)]
    assert not (run_folder / "out" / "store.db").exists(), "the store is on its own machine"
    assert stranger.wait(timeout=60) == USER_ERROR
    assert "key is missing, unknown or expired" in (cluster.folder / "stranger" / "log").read_text()
