"""Real containers, by podman: its settings, and small images that need no registry. With
`AGENTRL_TEST_ENGINE=docker`, those of the daemon that the docker command line reaches.

`python -m tests.runners.executors.real` makes the images and says where its storage is. They are
made once for a machine, known by their content, in the folder `AGENTRL_TEST_CONTAINERS`.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from agentrl.runners.executors.keeper import LABEL

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("AGENTRL_TEST_CONTAINERS") or f"/var/tmp/agentrl-tests-{os.getuid()}")
INSTALL = "apt-get install --no-install-recommends podman buildah runc catatonit busybox-static"
ENGINE = os.environ.get("AGENTRL_TEST_ENGINE", "podman")
NEEDS = ("podman", "buildah", "runc", "busybox") if ENGINE == "podman" else (ENGINE, "busybox")
APPLETS = (
    *(
        "sh",
        "ash",
        "cat",
        "chmod",
        "cp",
        "date",
        "dd",
        "echo",
        "env",
        "false",
        "find",
        "grep",
        "head",
        "id",
    ),
    *(
        "ip",
        "kill",
        "ln",
        "ls",
        "mkdir",
        "mv",
        "nc",
        "od",
        "printf",
        "ps",
        "pwd",
        "rm",
        "sed",
        "seq",
    ),
    *("base64", "gzip"),
    *("sleep", "sort", "stat", "tail", "tar", "test", "touch", "tr", "true", "wc", "wget", "yes"),
)
PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"


def missing() -> str:
    """Return why there are no real containers here; empty if there are."""
    lacking = [program for program in NEEDS if shutil.which(program) is None]
    return f"real containers need {', '.join(lacking)}: {INSTALL}" if lacking else ""


needs_podman = pytest.mark.skipif(bool(missing()), reason=missing())


def environment() -> dict[str, str]:
    """Return variables that give podman the tests' settings and storage."""
    if ENGINE != "podman":
        return {}
    FOLDER.mkdir(parents=True, exist_ok=True)
    storage = (HERE / "podman" / "storage.conf").read_text().replace("{folder}", str(FOLDER))
    written = FOLDER / f"storage-{hashlib.sha256(storage.encode()).hexdigest()[:12]}.conf"
    if not written.exists():
        new = written.with_suffix(f".{os.getpid()}")
        new.write_text(storage)
        new.rename(written)
    return {
        "CONTAINERS_CONF": str(HERE / "podman" / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(written),
        "BUILDAH_ISOLATION": "chroot",
    }


def busybox_image() -> str:
    """Return the name of an image with a shell and little else."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in ("bin", "etc", "root", "tmp", "usr/bin", "app"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        program = tarfile.TarInfo("bin/busybox")
        content = Path(busybox).read_bytes()
        program.size, program.mode = len(content), 0o755
        tar.addfile(program, io.BytesIO(content))
        for name in APPLETS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        passwd = tarfile.TarInfo("etc/passwd")
        passwd.size = len(PASSWD)
        tar.addfile(passwd, io.BytesIO(PASSWD.encode()))
    return imported("agentrl-busybox", layer.getvalue())


def imported(name: str, layer: bytes) -> str:
    """Return the name of an image of one layer, an archive, which is imported if it is not here."""
    image = f"localhost/{name}:{hashlib.sha256(layer).hexdigest()[:12]}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if podman("image", "inspect", image, check=False).returncode:
            how = ("--change", "CMD sh", "--change", "ENV PATH=/usr/bin:/bin")
            podman("import", *how, "-", image, input=layer)
    return image


def podman(
    *arguments: str, input: bytes | None = None, check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    env: Mapping[str, str] = {**os.environ, **environment()}
    return subprocess.run(
        [ENGINE, *arguments], env=env, input=input, capture_output=True, check=check
    )


def left_of(owner: str) -> list[str]:
    """The containers of a runner that exist."""
    listed = podman("ps", "-aq", "--filter", f"label={LABEL}={owner}")
    return listed.stdout.decode().split()


async def until_none_is_left(owner: str, timeout: float = 60.0) -> None:
    """Wait for the end of a runner's containers. Raises TimeoutError."""
    async with asyncio.timeout(timeout):
        while await asyncio.to_thread(left_of, owner):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@cache
def broken() -> str:
    """Return why podman starts no container here, as in a sandbox without mounts; empty if it
    does."""
    try:
        podman("run", "--rm", "--network", "none", busybox_image(), "true")
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        return f"{ENGINE} starts no container here: {said[-300:]}"
    return ""


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the small image; podman has its settings meanwhile."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    if broken():
        pytest.skip(broken())
    return busybox_image()


if __name__ == "__main__":
    print(missing() or broken() or f"{busybox_image()} in {FOLDER}")
