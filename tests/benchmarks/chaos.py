"""Does a run over several machines lose or train anything twice while everything around it breaks?

python -m tests.benchmarks.chaos --json [--faults 200] [--over 3600] [--seed 0]

Each machine is a network namespace: the store (SQLite behind `agentrl store serve`), the learner,
two policy servers at `engine.vllm.urls` (see `chaos_policy`), which take weights from the disk that
all have in common, and three runners. Faults come at random, spread evenly over `--over` seconds,
or where that is 0 each as soon as the run goes on after the one before: `kill -9` and SIGSTOP of
any process, a cable pulled out, a slow and lossy link, a disk that does not write, a step of the
store's clock. After each the run must commit another step. Then it must have ended where it would
have ended: every step once (`final_step`), nothing that the store answered for gone (`lost`), no
group in two steps and no rollout with two successes (`twice`).

Where the kernel has netem, links have 5 ms of delay and 1 % of loss all the time, and slow ones 100
ms and 10 %; elsewhere slow ones have a token bucket of 256 kbit/s, which drops what does not fit:
see `link`. The disk stands still because another process holds the database's lock; the clock is
that with which the store is opened, for namespaces share the machine's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.benchmarks.chaos_policy import NAME
from tests.benchmarks.report import arguments, report
from tests.system.conftest import ASKS, RUN, VERIFIER
from tests.system.machines import Machine, Network, network, possible
from tests.system.test_machines import AGENTRL, FILES, GROUPS, KEYS, POLICY_KEY, PORT, SIZE

Figures = dict[str, float | int | str | dict[str, int]]
RUNNERS, POLICIES = 3, 2
PAUSE = 3.0  # seconds that each call of an agent takes where faults are spread over a time
ROOT = Path(__file__).parents[2]
SLOWEST = 400.0  # seconds until the next step after a fault, on a machine that others use too
NETEM = "netem"
WELL = (NETEM, "delay", "5ms", "2ms", "loss", "1%")
ILL = {
    NETEM: (NETEM, "delay", "100ms", "50ms", "loss", "10%"),
    "tbf": ("tbf", "rate", "256kbit", "burst", "8k", "latency", "100ms"),
}


@dataclass
class Role:
    """What runs on a machine, and is started again whenever it ends."""

    machine: Machine
    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.process = self.start()

    def alive(self) -> bool:
        return self.process.poll() is None


class Cluster:
    """The machines of one run, each with a folder of its own."""

    def __init__(
        self, lan: Network, folder: Path, model: Path, steps: int, pause: float = 0.0
    ) -> None:
        """pause: seconds that an agent waits before it ends."""
        self.lan, self.folder, self.steps, self.model = lan, folder, steps, model
        self.link = slow_link()
        for name in ("store", "run", *policy_names(), *runner_names()):
            (folder / name).mkdir()
        self.run_folder, self.database = folder / "run", folder / "store" / "store.db"
        self.offset = folder / "offset"  # of the store's clock, in seconds
        self.offset.write_text("0")
        write_run(self.run_folder, model, pause)
        self.roles: dict[str, Role] = {}
        store, learner, *policies = (lan.machine() for _ in range(2 + POLICIES))
        self.policies = [f"http://{machine.address}:{PORT}" for machine in policies]
        self.url = f"http://{store.address}:{PORT}"
        self.roles["store"] = Role(store, lambda: self._serve(store))
        for name, machine in zip(policy_names(), policies, strict=True):
            self.roles[name] = Role(machine, lambda m=machine, n=name: self._policy(m, n))
        self.roles["learner"] = Role(learner, lambda: self._train(learner))
        for name in runner_names():
            machine = lan.machine()
            for file in FILES:
                shutil.copy(self.run_folder / file, folder / name)
            self.roles[name] = Role(machine, lambda m=machine, n=name: self._runner(m, n))
        if self.link == NETEM:
            for role in self.roles.values():
                role.machine.shape(*WELL)

    def _serve(self, machine: Machine) -> subprocess.Popen[bytes]:
        (self.database.parent / "keys").write_text("".join(f"{s}:{k}\n" for s, k in KEYS.items()))
        command = [sys.executable, "-m", "tests.benchmarks.chaos_store", machine.address, str(PORT)]
        return machine.start([*command, str(self.offset)], self.database.parent)

    def _policy(self, machine: Machine, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.benchmarks.chaos_policy", str(self.model)]
        return machine.start([*command, machine.address, str(PORT)], self.folder / name)

    def _train(self, machine: Machine) -> subprocess.Popen[bytes]:
        settings = {
            "store": self.url, "steps": self.steps, "runner.processes": 0,
            "engine.host": machine.address, "engine.key_env": "POLICY_KEY",
            "engine.kind": "vllm", "engine.vllm.urls": json.dumps(self.policies),
            "algorithm.groups": GROUPS, "algorithm.group_size": SIZE, "eval.tasks": 0,
        }  # fmt: skip
        overrides = [f"{key}={value}" for key, value in settings.items()]
        command = [*AGENTRL, "train", "run.toml", *overrides]
        secrets = {"AGENTRL_STORE_KEY": KEYS["admin"], "POLICY_KEY": POLICY_KEY}
        return machine.start(command, self.run_folder, **secrets)

    def _runner(self, machine: Machine, name: str) -> subprocess.Popen[bytes]:
        joining = ["--store", self.url, "--key", KEYS["runner"], "--run", "tiny", "--root", "."]
        command = [*AGENTRL, "runner", "start", *joining]
        return machine.start(command, self.folder / name, POLICY_KEY=POLICY_KEY)

    def asked(self, query: str) -> list[tuple[object, ...]]:
        if not self.database.exists():
            return []
        uri = f"file:{self.database}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=60)) as connection:
            try:
                return connection.execute(query).fetchall()
            except sqlite3.OperationalError:
                return []  # the schema is not there yet

    def committed(self) -> int:
        return len(self.asked("select step from steps where committed"))

    def ended(self) -> bool:
        """Whether training has ended well. What has ended otherwise is started again."""
        for name, role in self.roles.items():
            if not role.alive():
                if name == "learner" and role.process.returncode == 0:
                    return True
                role.process = role.start()
        return False

    def until(self, true: Callable[[], bool], what: str) -> bool:
        """False if training ended before."""
        deadline = time.monotonic() + SLOWEST
        while not true():
            if self.ended():
                return False
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}\n{self.words()}")
            time.sleep(0.1)
        return True

    def words(self) -> str:
        logs = [*self.folder.glob("*/log"), *self.run_folder.glob("out/logs/*.log")]
        return "\n".join(f"{log}: {log.read_text()[-1500:]}" for log in logs)


# -- faults ----------------------------------------------------------------------------------------


def kill(cluster: Cluster, role: Role, chance: random.Random) -> None:
    """One process of the role, or all of them."""
    pids = tree(role.process.pid)
    signal_all(pids if chance.random() < 0.5 else [chance.choice(pids)], signal.SIGKILL)


def stop(cluster: Cluster, role: Role, chance: random.Random) -> None:
    pids = tree(role.process.pid)
    signal_all(pids, signal.SIGSTOP)
    try:
        time.sleep(chance.uniform(1, 6))  # a lease is 3 s
    finally:
        signal_all(pids, signal.SIGCONT)


def partition(cluster: Cluster, role: Role, chance: random.Random) -> None:
    role.machine.plug(connected=False)
    time.sleep(chance.uniform(1, 6))
    role.machine.plug(connected=True)


def slow(cluster: Cluster, role: Role, chance: random.Random) -> None:
    role.machine.shape(*ILL[cluster.link])
    time.sleep(chance.uniform(1, 6))
    role.machine.shape(*(WELL if cluster.link == NETEM else ("pfifo",)))


def disk(cluster: Cluster, role: Role, chance: random.Random) -> None:
    with contextlib.closing(sqlite3.connect(cluster.database, timeout=30)) as holder:
        holder.execute("begin immediate")
        time.sleep(chance.uniform(1, 6))
        holder.execute("rollback")


def clock(cluster: Cluster, role: Role, chance: random.Random) -> None:
    replaced = cluster.offset.with_name("offset.new")
    replaced.write_text(str(chance.choice((-3600, -60, 60, 3600))))
    replaced.replace(cluster.offset)


FAULTS = {fault.__name__: fault for fault in (kill, stop, partition, slow, disk, clock)}
WEIGHTS = {"kill": 4, "stop": 2, "partition": 2, "slow": 1, "disk": 1, "clock": 1}


def kinds(chance: random.Random) -> Iterator[str]:
    """Names of faults without end: as often as their weights say, in an order of chance."""
    while True:
        some = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
        chance.shuffle(some)
        yield from some


def schedule(faults: int, over: float, chance: random.Random) -> list[float]:
    """Seconds after the first step: one fault at any time of each of as many equal parts."""
    return [(number + chance.random()) * over / faults for number in range(faults)]


def strike(cluster: Cluster, name: str, chance: random.Random) -> str:
    """One fault; returns its name and victim."""
    victim = "store" if name in ("disk", "clock") else chance.choice(list(cluster.roles))
    FAULTS[name](cluster, cluster.roles[victim], chance)
    return f"{name} {victim}"


def tree(pid: int) -> list[int]:
    """The process and its descendants that are still there."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(one for child in children for one in tree(int(child)))]


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def slow_link() -> str:
    """How this kernel makes a link slow."""
    trial = "ip link add cable0 type veth peer name cable1 && tc qdisc add dev cable0 root netem"
    made = subprocess.run(
        ["unshare", "--map-root-user", "--net", "sh", "-c", trial], capture_output=True, check=False
    )
    return NETEM if made.returncode == 0 else "tbf"


# -- the run ---------------------------------------------------------------------------------------


def measure(faults: int, over: float, seed: int, model: Path) -> Figures:
    """`faults` is how many were made. over: seconds from the first to the end of the last one's
    share, which slow agents fill with work; 0: as fast as the run goes on."""
    chance, kind, victim = random.Random(seed), Counter[str](), Counter[str]()
    faulty, times, waits = kinds(chance), list[float](), list[float]()
    steps = math.ceil(over / PAUSE) + 6 if over else 20 * faults + 6
    hold = int(over + faults * SLOWEST)
    with tempfile.TemporaryDirectory() as name, network(hold) as lan:
        cluster = Cluster(lan, Path(name), model, steps, PAUSE if over else 0.0)
        cluster.until(lambda: cluster.committed() >= 1, "No first step was committed.")
        started = time.monotonic()
        for due in schedule(faults, over, chance):
            while not (ended := cluster.ended()) and time.monotonic() < started + due:
                time.sleep(0.1)
            if ended:
                break
            times.append(time.monotonic() - started)
            what = strike(cluster, next(faulty), chance)
            kind[what.split()[0]] += 1
            victim[what.split()[1]] += 1
            print(f"{times[-1]:.0f} s: {what}", file=sys.stderr, flush=True)
            waits.append(wait_for_step(cluster, f"Stuck after {what}."))
        while not cluster.ended():  # the steps that are left take as long as they take
            wait_for_step(cluster, "The run stands still.")
        figures: Figures = {"faults": len(times), "by_fault": dict(kind), "by_victim": dict(victim)}
        figures |= verdict(cluster) | {"link": cluster.link, "policies": f"{POLICIES} x {NAME}"}
        figures |= {"first_fault_s": round(times[0]), "last_fault_s": round(times[-1])}
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        figures |= {"widest_gap_s": round(max(gaps, default=0)), "slowest_s": round(max(waits))}
        return figures | {"seconds": round(time.monotonic() - started)}


def wait_for_step(cluster: Cluster, otherwise: str) -> float:
    """Returns how many seconds the next step took."""
    before, started = cluster.committed(), time.monotonic()
    cluster.until(lambda: cluster.committed() > before, otherwise)
    return time.monotonic() - started


def verdict(cluster: Cluster) -> dict[str, int]:
    """Counted in the database, whose server is killed first."""
    store = cluster.roles["store"].process
    store.kill()
    store.wait()
    records = {
        step: json.loads(str(record))["groups"]
        for step, record in cluster.asked("select step, record from steps where committed")
    }
    trained = Counter(group for groups in records.values() for group in groups)
    marked = dict(cluster.asked("select id, trained_step from groups where state = 'trained'"))

    def count(query: str) -> int:
        return int(str(cluster.asked(f"select count(*) from ({query})")[0][0]))

    unfinished = (
        "select 1 from rollouts r join groups g on g.id = r.group_id "
        "where g.state = 'trained' and r.state in ('queued', 'running')"
    )
    empty = (
        "select 1 from rollouts r join groups g on g.id = r.group_id where g.state = 'trained' "
        "and r.state = 'succeeded' and not exists (select 1 from transitions t "
        "where t.attempt_id = r.attempt_id and t.late = 0)"
    )
    succeeded_twice = (
        "select 1 from attempts where state = 'succeeded' group by rollout_id having count(*) > 1"
    )
    counted = "select 1 from rollouts where state = 'succeeded'"
    ((told,),) = cluster.asked("select succeeded from runs")
    wrong = sum(marked.get(group) != step for step, all in records.items() for group in all)
    check = cluster.asked("pragma integrity_check") != [("ok",)]
    return {
        "lost": len(set(range(cluster.steps)) - records.keys()) + wrong + check
        + count(unfinished) + count(empty) + abs(count(counted) - int(str(told))),
        "twice": sum(n - 1 for n in trained.values()) + count(succeeded_twice)
        + len(marked.keys() - trained.keys()),
        "final_step": len(records),
        "steps": cluster.steps,
        "attempts": count("select 1 from attempts"),
        "rollouts": count("select 1 from rollouts"),
    }  # fmt: skip


def runner_names() -> list[str]:
    return [f"runner{number}" for number in range(RUNNERS)]


def policy_names() -> list[str]:
    return [f"policy{number}" for number in range(POLICIES)]


def write_run(folder: Path, model: Path, pause: float) -> None:
    tasks = [{"input": f"What is {i} plus {i + 1}?", "answer": 2 * i + 1} for i in range(20)]
    waiting = f"    import time\n    time.sleep({pause})\n    return answer.json()"
    agent = ASKS.format(times=1).replace("    return answer.json()", waiting)
    (folder / "agent.py").write_text(agent)
    (folder / "verifier.py").write_text(VERIFIER)
    lines = (msgspec.json.encode(task) + b"\n" for task in tasks)
    (folder / "tasks.jsonl").write_bytes(b"".join(lines))
    (folder / "run.toml").write_text(RUN.format(model=model))


def tiny_model(folder: Path) -> Path:
    from tests.tiny_models import qwen2

    return qwen2(folder, seed=0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--over", type=float, default=3600.0, help="seconds; 0: without a pause")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not possible():
        sys.exit("This machine lets its users have no network namespaces.")
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.faults, options.over, options.seed, tiny_model(Path(folder)))
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
