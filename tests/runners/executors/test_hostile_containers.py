"""Real containers in which somebody does his worst: what may not be silent, lost or unlimited."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.runners.executors.containers import (
    ContainerEnded,
    ContainerError,
    Containers,
    ContainerSpec,
)
from tests.runners.executors.real import ENGINE, needs_podman, podman
from tests.runners.executors.real import real as real

pytestmark = needs_podman
BOMB = "bomb() { bomb | bomb & }; bomb; sleep 1000"


@pytest.fixture
async def containers(real: str) -> AsyncIterator[Containers]:
    containers = Containers(ENGINE, warm=0)
    await containers.start()
    yield containers
    await containers.close()


@pytest.mark.parametrize("how", ["kill", "rm", "signal"])
async def test_who_ended_a_container_is_certain(
    containers: Containers, real: str, how: str
) -> None:
    """Its first process ends by SIGKILL from outside only, whatever the engine knows yet."""
    container = await containers.take(ContainerSpec(real))
    running = asyncio.create_task(container.run(["sleep", "1000"], timeout=20.0))
    await asyncio.sleep(0.5)
    if how == "signal":
        os.kill(container.pid, signal.SIGKILL)
    else:
        argv = (how, *(["--force"] if how == "rm" else []), container.name)
        await asyncio.to_thread(podman, *argv)
    with pytest.raises(ContainerError, match="the container is gone") as raised:
        await running
    assert not isinstance(raised.value, ContainerEnded)
    await container.discard()


async def test_a_container_that_ends_itself_is_to_blame(
    containers: Containers, real: str, tmp_path: Path
) -> None:
    entry = 'ENTRYPOINT ["sh", "-c", "sleep 3; exit 5"]'
    (tmp_path / "Dockerfile").write_text(f"FROM {real}\n{entry}\n")
    spec = ContainerSpec(await containers.build(tmp_path), entrypoint=True)
    container = await containers.take(spec)
    with pytest.raises(ContainerEnded, match="ended by what runs in it"):
        await container.run(["sleep", "1000"], timeout=20.0)
    await container.discard()
    podman("rmi", "--force", spec.image)


async def test_what_cannot_be_killed_one_by_one_ends_with_its_container(
    containers: Containers, real: str
) -> None:
    """A limit of processes that is reached leaves none for `kill`."""
    container = await containers.take(ContainerSpec(real, pids=20))
    with pytest.raises((ContainerEnded, TimeoutError)):
        await container.run(["sh", "-c", f"{BOMB}"], timeout=1.5)
    if container.why:
        with pytest.raises(ContainerEnded, match="cannot be ended"):
            await container.check()
    else:  # they were killed, and there is room again
        assert (await container.run(["true"])).status == 0
    await container.discard()


async def test_copies_have_all_files_and_no_more_than_a_container_may_have(
    containers: Containers, real: str, tmp_path: Path
) -> None:
    container = await containers.take(ContainerSpec(real, disk_mb=20))
    make = "mkdir /out; echo one > /out/a; ln /out/a /out/b; ln -s a /out/c; ln /out/c /out/d"
    await container.run(["sh", "-c", make])
    assert await container.copy_out("/out", tmp_path / "out")
    copied = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert copied.items() >= {"a": "one\n", "b": "one\n"}.items()
    assert "c" not in copied
    await container.run(
        ["dd", "if=/dev/zero", "of=/out/hole", "bs=1", "count=1", "seek=3000000000"]
    )
    with pytest.raises(ContainerEnded, match="/out has more than 20 MB"):
        await container.copy_out("/out", tmp_path / "large")
    assert sum(file.stat().st_size for file in containers.cli.scratch.glob("*")) < 10 * 2**20
    await container.discard()


async def test_a_copy_that_fails_is_not_a_missing_file(
    containers: Containers, real: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = await containers.take(ContainerSpec(real))
    monkeypatch.setattr("agentrl.runners.executors.container_images.COPY_TIMEOUT", 0.001)
    asked = container._ask

    async def slow(_: object, *words: str, **files: Path) -> object:
        late = asked if words[0] == "cp" else containers.cli.ask
        return await late(*words, **files)

    monkeypatch.setattr(type(container), "_ask", slow)
    with pytest.raises(ContainerError, match=r"/bin cannot be copied.*longer than 0.001 s"):
        await container.copy_out("/bin", tmp_path / "bin")
    await container.discard()


async def test_volumes_count_and_what_the_first_process_says_is_not_kept(
    containers: Containers, real: str, tmp_path: Path
) -> None:
    """The disk's watch goes on after its keeper was killed."""
    (tmp_path / "Dockerfile").write_text(f"FROM {real}\nVOLUME /data\n")
    image = await containers.build(tmp_path)
    process = containers.cli._keeper
    assert process is not None
    process.kill()
    await asyncio.to_thread(process.wait)
    container = await containers.take(ContainerSpec(image, disk_mb=50))
    await container.run(["sh", "-c", "head -c 30000000 /dev/zero > /proc/1/fd/1"])
    field = "{{.HostConfig.LogConfig.Type}}"
    assert podman("inspect", "--format", field, container.name).stdout.strip() == b"none"
    one = "dd if=/dev/zero of=/data/f$i bs=1M count=20 2>/dev/null; i=$((i+1))"
    with pytest.raises(ContainerEnded, match="wrote more than 50 MB"):
        await container.run(["sh", "-c", f"i=0; while :; do {one}; sleep 0.1; done"], timeout=40.0)
    await container.discard()


async def test_a_failure_of_long_ago_is_not_handed_out(
    containers: Containers, real: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not start while nobody needed it is started again."""
    spec = ContainerSpec("localhost/agentrl-not-yet:1")
    containers.expect(spec, 1)
    await containers.ready(spec)
    assert "no container is kept ready" in caplog.text
    podman("tag", real, spec.image)
    try:
        container = await containers.take(spec)
        assert (await container.run(["echo", "fine"])).stdout == "fine\n"
        await container.discard()
    finally:
        podman("rmi", spec.image)


async def test_an_engine_on_another_machine(
    containers: Containers, real: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process's number means nothing here, or is that of somebody else."""
    monkeypatch.setattr("agentrl.runners.executors.containers.command_line", lambda pid: "init")
    container = await asyncio.wait_for(containers.take(ContainerSpec(real)), 20.0)
    assert container.pid == 0
    assert (await container.run(["false"])).status == 1
    await container.end()
    with pytest.raises(ContainerError):
        await container.check()
    await container.discard()
