"""Ends containers that write more than they may, before the disk is full for others."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.base import threads
from agentrl.runners.containers.cli import Cli, ContainerError
from agentrl.runners.containers.keeper import LABEL

if TYPE_CHECKING:
    from agentrl.runners.containers.running import Container

log = logging.getLogger("agentrl.runner")
INTERVAL = 0.5  # seconds between looks at the free space
GROWTH = 64 * 2**20  # bytes that were written by anybody, after which containers are measured
MB = 2**20
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
LIMITS = {  # as a controller of cgroups, and in docker's `info`
    "memory": ("memory", "MemoryLimit"),
    "cores": ("cpu", "CpuCfsQuota"),
    "processes": ("pids", "PidsLimit"),
}
VOLUMES = '{{.Name}}{{range .Mounts}}{{if eq .Type "volume"}} {{.Source}}{{end}}{{end}}'
SIZE = re.compile(r"([0-9.]+) ?([kKMGT]?B)")


class DiskWatch:
    """Measures containers whenever the disk with their files has become fuller; docker itself can
    limit them on few file systems only."""

    def __init__(self, cli: Cli, containers: Mapping[str, Container]) -> None:
        """`containers`: by name, those that are in use."""
        self._cli, self._containers = cli, containers
        self._free: dict[Path, int] = {}  # when they were measured last
        self._folder: Path | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        said = await self._cli.ask("info", "--format", "{{json .}}")
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            known = msgspec.json.decode(said.out)
            self._folder = Path(known.get("DockerRootDir") or known["store"]["graphRoot"])
            if ignored := ignored_limits(known):
                log.warning(
                    "%s here ignores limits of %s, as its user may not set them; run it as root, or"
                    " delegate these controllers of cgroups v2 to the user",
                    *(self._cli.program, " and ".join(ignored)),
                )
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            limited = [c for c in self._containers.values() if c.spec.disk_mb and not c.why]
            if limited and self._fuller(limited):
                with suppress(ContainerError):  # the next keeper can be asked again
                    await self._measure(limited)

    def _fuller(self, limited: list[Container]) -> bool:
        """Whether so much was written since the last measurement that a look is due."""
        folders = {c.share.parent for c in limited if c.share is not None}
        folders |= {self._folder} if self._folder else set()
        now = {folder: free for folder in folders if (free := _free(folder)) is not None}
        before = {folder: self._free.setdefault(folder, free) for folder, free in now.items()}
        if any(before[folder] - free > GROWTH for folder, free in now.items()):
            self._free = now
            return True
        self._free |= {folder: max(before[folder], free) for folder, free in now.items()}
        return not now

    async def _measure(self, limited: list[Container]) -> None:
        own = ("--filter", f"label={LABEL}={self._cli.owner}")
        how = ("ps", "--all", "--size", *own, "--format", "{{.Names}} {{.Size}}")
        listed = await self._cli.ask(*how)
        written = {}
        for line in listed.out.splitlines():
            name, _, said = line.partition(" ")
            if (found := SIZE.match(said)) is not None:
                written[name] = float(found[1]) * UNITS[found[2].upper()]
        volumes = await self._volumes(limited)
        for container in limited:
            size = written.get(container.name, 0.0)
            for volume in volumes.get(container.name, ()):
                size += await threads.call(_size, Path(volume))
            if container.share is not None:
                size += await threads.call(_size, container.share)
            if size > container.spec.disk_mb * MB:
                container.why = (
                    f"the agent wrote more than {container.spec.disk_mb} MB to its container's disk"
                )
                self._cli.remove(container.name)  # what runs in it ends, and says so

    async def _volumes(self, limited: list[Container]) -> dict[str, list[str]]:
        """The folders on this machine that images want beside their containers, by container."""
        names = [container.name for container in limited]
        listed = await self._cli.ask("inspect", "--format", VOLUMES, *names)
        lines = [line.removeprefix("/").split() for line in listed.out.splitlines()]
        return {line[0]: line[1:] for line in lines if line}


def ignored_limits(known: Any) -> list[str]:
    """Which limits an engine does not keep, by what its `info` says."""
    if (host := known.get("host")) is None:  # docker
        return [name for name, (_, key) in LIMITS.items() if known.get(key) is False]
    has = host.get("cgroupControllers") or ()
    rootless = host["security"]["rootless"]
    return [name for name, (controller, _) in LIMITS.items() if rootless and controller not in has]


def _free(folder: Path) -> int | None:
    try:
        known = os.statvfs(folder)
    except OSError:
        return None
    return known.f_bavail * known.f_frsize


def _size(folder: Path) -> int:
    """Return the bytes of the files below a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118
    return total
