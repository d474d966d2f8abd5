"""Machines on one machine: each a network namespace of its own, all on one bridge.

They live inside a user namespace, so that no privilege is needed and nothing outside is touched;
the kernel removes them when the last process in them ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SUBNET = "10.77.0"
HOLD = 600  # seconds for which a namespace is kept if the tests are killed
BRIDGE = "bridge"


class Network:
    """Machines that reach each other and nothing else."""

    def __init__(self, hold: int = HOLD) -> None:
        self._keep = f"echo; exec sleep {hold}"
        self._holders: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._addresses = 0
        self._switch = self._hold(["unshare", "--map-root-user", "--net"])
        self._ip(self._switch, "link", "add", BRIDGE, "type", "bridge")
        self._ip(self._switch, "link", "set", BRIDGE, "up")

    def machine(self) -> Machine:
        """Another machine, on the next address."""
        self._addresses += 1
        number = self._addresses
        pid = self._hold([*self._inside(self._switch), "unshare", "--net"])
        cable, address = f"cable{number}", f"{SUBNET}.{number}"
        self._ip(
            self._switch,
            *("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid)),
        )
        self._ip(self._switch, "link", "set", cable, "master", BRIDGE, "up")
        self._ip(pid, "link", "set", "lo", "up")
        self._ip(pid, "address", "add", f"{address}/24", "dev", "eth0")
        self._ip(pid, "link", "set", "eth0", "up")
        return Machine(self, pid, address, cable)

    def plug(self, machine: Machine, *, connected: bool) -> None:
        """Put in or pull out the machine's cable."""
        self._ip(self._switch, "link", "set", machine.cable, "up" if connected else "down")

    def shape(self, machine: Machine, *discipline: str) -> None:
        """How packets leave the switch for the machine: `tc qdisc`, of which each kernel has
        some."""
        command = ["tc", "qdisc", "replace", "dev", machine.cable, "root", *discipline]
        subprocess.run([*self._inside(self._switch), *command], check=True, timeout=10)

    def start(
        self, pid: int, command: list[str], folder: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with Path(folder, "log").open("ab") as log:
            process = subprocess.Popen(
                [*self._inside(pid), *command],
                cwd=folder,
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in (*self._started, *reversed(self._holders)):
            if process.poll() is None:
                process.kill()
            process.wait(timeout=10)

    def _hold(self, prefix: list[str]) -> int:
        """Process id of what keeps a new network namespace."""
        holder = subprocess.Popen([*prefix, "sh", "-c", self._keep], stdout=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdout is not None
        said = holder.stdout.read(1)  # the namespace is there
        holder.stdout.close()
        assert said, "the namespace was not made"
        return holder.pid

    def _ip(self, pid: int, *arguments: str) -> None:
        subprocess.run([*self._inside(pid), "ip", *arguments], check=True, timeout=10)

    def _inside(self, pid: int) -> list[str]:
        return ["nsenter", f"--target={pid}", "--user", "--preserve-credentials", "--net"]


class Machine:
    """One of them: its address, and what runs there."""

    def __init__(self, network: Network, pid: int, address: str, cable: str) -> None:
        self.address, self.cable = address, cable
        self._network, self._pid = network, pid

    def start(self, command: list[str], folder: Path, **env: str) -> subprocess.Popen[bytes]:
        """Start a command there; what it says is in the folder's `log`."""
        return self._network.start(self._pid, command, folder, env)

    def plug(self, *, connected: bool) -> None:
        self._network.plug(self, connected=connected)

    def shape(self, *discipline: str) -> None:
        self._network.shape(self, *discipline)


def possible() -> bool:
    """Whether this kernel lets its users have networks of their own."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    trial = f"ip link add cable0 type veth peer name cable1 && ip link add {BRIDGE} type bridge"
    made = subprocess.run(
        ["unshare", "--map-root-user", "--net", "sh", "-c", trial],
        capture_output=True,
        timeout=10,
        check=False,
    )
    return made.returncode == 0


@contextmanager
def network(hold: int = HOLD) -> Iterator[Network]:
    made = Network(hold)
    try:
        yield made
    finally:
        made.close()
