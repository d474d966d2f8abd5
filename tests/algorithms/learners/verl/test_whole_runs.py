"""Whole runs on verl's workers: killed and continued, and with vLLM and a LangChain agent."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.store import open_store
from tests.algorithms.learners.verl.program import environment
from tests.system.machines import SUBNET, Machine, Network, network, possible
from tests.system.test_run import measured

psutil = pytest.importorskip("psutil")
LIMIT = 300  # seconds for one start; 30 on two idle cores
pytestmark = [
    pytest.mark.skipif(
        find_spec("verl") is None or find_spec("ray") is None,
        reason="verl is not installed: run `make test-engines`",
    ),
    pytest.mark.timeout(4 * LIMIT),
]
PROGRAM = Path(__file__).parent / "verl_run.py"
SHOWN = (
    *("loss", "grad_norm", "lr", "policy/entropy", "logprob_difference/mean"),
    *("critic/loss", "critic/value_mean", "reference/beta", "reference/drift"),
)


@contextmanager
def short_folder() -> Iterator[str]:
    """Where Ray keeps its sockets, whose paths must be short; known to all its processes."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield folder
        for process in of(folder):
            process.kill()


@pytest.fixture
def ray_folder() -> Iterator[str]:
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def whole(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run on one node that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with short_folder() as ray:
        uninterrupted = start(folder, tiny_model_dir, ray)
        assert uninterrupted.returncode == 0, uninterrupted.stderr[-2000:]
        gone(ray)
    return folder


def of(folder: str) -> list[psutil.Process]:
    """The processes of a Ray that works in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == folder:
                found.append(process)
        except psutil.Error:
            continue
    return found


def start(folder: Path, model: Path, ray: str, *strike: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(model), *strike],
        env=environment(RAY_TMPDIR=ray),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def outcome(folder: Path) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Metrics of every step, and all tensors of the last checkpoint."""

    async def read() -> tuple[list[list[float]], str]:
        async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
            rows = [row for row in await store.steps("steady") if row.committed]
            state = await store.run("steady")
        assert state is not None
        assert state.checkpoint is not None
        losses = [[row.metrics[name] for name in SHOWN] for row in rows]
        return losses, str(folder / "out" / state.checkpoint)

    losses, checkpoint = asyncio.run(read())
    folder = Path(checkpoint)
    return losses, {
        f"{file.relative_to(folder)}/{name}": tensor
        for file in folder.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_a_killed_run_ends_where_it_would_have_ended(
    tiny_model_dir: Path, tmp_path: Path, ray_folder: str, whole: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    killed = start(broken, tiny_model_dir, ray_folder, "driver:optimizer:3")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    gone(ray_folder)

    failed = start(broken, tiny_model_dir, ray_folder, "worker:update:2")
    assert failed.returncode == 1
    said = failed.stderr.splitlines()[-1]
    assert said.startswith("TrainingError: a worker of verl died in '"), failed.stderr
    assert said.endswith("; the same command goes on after the last checkpoint")
    gone(ray_folder)

    continued = start(broken, tiny_model_dir, ray_folder)
    assert continued.returncode == 0, continued.stderr[-2000:]
    (losses, tensors), (expected, right) = outcome(broken), outcome(whole)
    assert len(losses) == 3
    assert losses == expected
    assert tensors.keys() == right.keys()
    assert {name.partition("/")[0] for name in tensors} > {"critic", "reference.safetensors"}
    assert not [name for name, tensor in tensors.items() if not torch.equal(tensor, right[name])]


def gone(folder: str) -> None:
    """Nothing of Ray is left; it may take a moment to notice that its driver was killed."""
    until = time.monotonic() + 180
    while left := of(folder):
        assert time.monotonic() < until, [process.cmdline() for process in left]
        psutil.wait_procs(left, timeout=1.0)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_langchain_agent_is_trained_with_grpo_on_verl_and_vllm(
    run_folder: Path, wide_model_dir: Path, ray_folder: str
) -> None:
    """Log-probs of sampler and learner agree at every step: what FSDP2 workers learned is what vLLM
    serves."""
    settings = [
        *(
            "steps=2",
            "algorithm.groups=2",
            "algorithm.group_size=4",
            f"policy.model={wide_model_dir}",
        ),
        *("engine.kind=vllm", "engine.max_context=512"),
        *("learner.kind=verl", "learner.verl.gpus_per_node=2", "learner.verl.attention=sdpa"),
    ]
    trained = subprocess.run(
        [sys.executable, "-m", "agentrl", "train", "run.toml", *settings],
        cwd=run_folder,
        env=environment(RAY_TMPDIR=ray_folder),
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    gone(ray_folder)

    steps = measured(run_folder)
    assert len(steps) == 2
    for step in steps:
        assert step["rollouts"] == 8
        assert step["update/skipped"] == 0
        assert step["logprob_difference/max"] <= 1e-4
        assert step["policy/entropy"] > 0


class Cluster:
    """A Ray cluster with a token. Its nodes are machines of one network, with one GPU each."""

    PORT = 6379

    def __init__(self, lan: Network, folder: Path, ray: str) -> None:
        self.lan, self.folder, self.ray = lan, folder, ray
        token = folder / "token"
        token.write_text("token-" + "t" * 40)
        self.key = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self.head, self.address = self.lan.machine(), f"{SUBNET}.1:{self.PORT}"
        opened = f"--node-ip-address={self.head.address}"
        listening = ["--head", f"--port={self.PORT}", opened, "--include-dashboard=false"]
        self._start(self.head, "head", listening, self.key)
        self.until(lambda: "Ray runtime started" in self.log("head"))

    def join(self, name: str, key: dict[str, str]) -> tuple[Machine, subprocess.Popen[bytes]]:
        """Another node. key: the environment by which it has the token."""
        machine = self.lan.machine()
        return machine, self._start(machine, name, [f"--address={self.address}"], key)

    def train(
        self, folder: Path, model: Path, key: dict[str, str], *strike: str
    ) -> subprocess.Popen[bytes]:
        """The run of `PROGRAM` on two nodes, started on the head."""
        command = [sys.executable, str(PROGRAM), str(folder), str(model), *strike]
        return self.head.start(command, folder, **self._env(RAY_ADDRESS=self.address, **key))

    def log(self, name: str) -> str:
        return (self.folder / name / "log").read_text()

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not true():
            logs = self.folder.glob("*/log")
            assert time.monotonic() < deadline, [log.read_text()[-2000:] for log in logs]
            time.sleep(0.05)

    def _start(
        self, machine: Machine, name: str, how: list[str], key: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        (self.folder / name).mkdir()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *how]
        memory = f"--object-store-memory={100 * 2**20}"
        return machine.start([*command, memory], self.folder / name, **self._env(**key))

    def _env(self, **more: str) -> dict[str, str]:
        """In which a silent node is given up in seconds, for Ray's half a minute."""
        noticed = {"period_ms": "500", "timeout_ms": "1000", "failure_threshold": "3"}
        return environment(
            **{f"RAY_health_check_{name}": value for name, value in noticed.items()},
            RAY_TMPDIR=self.ray,
            RAY_OVERRIDE_RESOURCES='{"CPU": 4, "GPU": 1}',
            GLOO_SOCKET_IFNAME="eth0",  # these machines have no name of their own
            **more,
        )


@pytest.fixture
def cluster(tmp_path: Path, ray_folder: str) -> Iterator[Cluster]:
    with network(hold=4 * LIMIT) as lan:
        yield Cluster(lan, tmp_path, ray_folder)


@pytest.mark.skipif(not possible(), reason="users have no network namespaces here")
def test_a_run_on_two_nodes_survives_the_loss_of_one(
    tiny_model_dir: Path, tmp_path: Path, cluster: Cluster, whole: Path
) -> None:
    """One is lost in the middle of a step; another takes its place, and the run ends where it would
    have ended on one node."""
    broken = tmp_path / "broken"
    broken.mkdir()
    none = {"RAY_AUTH_MODE": "disabled"}
    _, stranger = cluster.join("stranger", none)
    second, _ = cluster.join("second", cluster.key)
    refused = cluster.train(broken, tiny_model_dir, none)
    assert stranger.wait(timeout=LIMIT) == 1
    assert "Authentication token is missing or incorrect" in cluster.log("stranger")
    assert refused.wait(timeout=LIMIT) == 1
    assert cluster.log("broken").splitlines()[-1] == (
        f"ConfigError: RAY_ADDRESS = '{cluster.address}': Ray wants its token there; set "
        "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH, or RAY_AUTH_TOKEN, as for its `ray start`"
    )

    lost = cluster.train(broken, tiny_model_dir, cluster.key, "node:step:4")
    machines = {cluster.head.address, second.address}
    cluster.until(lambda: machines <= {each.name for each in broken.iterdir()})
    second.plug(connected=False)
    assert lost.wait(timeout=LIMIT) == 1
    assert cluster.log("broken").splitlines()[-1] == (
        f"TrainingError: a worker of verl died in 'step' (its node {second.address} is lost: "
        "health check failed due to missing too many heartbeats); the same command goes on after "
        "the last checkpoint"
    )

    cluster.join("third", cluster.key)
    continued = cluster.train(broken, tiny_model_dir, cluster.key)
    assert continued.wait(timeout=LIMIT) == 0, cluster.log("broken")[-2000:]
    (losses, tensors), (expected, right) = outcome(broken), outcome(whole)
    assert losses == expected
    assert tensors.keys() == right.keys()
    assert not [name for name, tensor in tensors.items() if not torch.equal(tensor, right[name])]
