"""Real containers without a rollout: images, programs, files, and those that are kept ready."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.runners.executors.containers import (
    ContainerEnded,
    ContainerError,
    Containers,
    ContainerSpec,
)
from tests.runners.executors.real import ENGINE, left_of, needs_podman, podman
from tests.runners.executors.real import real as real

pytestmark = needs_podman
BYTES = bytes(range(256)) * 300  # more than a pipe holds


@pytest.fixture
async def containers(real: str) -> AsyncIterator[Containers]:
    containers = Containers(ENGINE, warm=0)
    await containers.start()
    yield containers
    owner = containers.cli.owner
    await containers.close()
    assert left_of(owner) == []


async def test_files_go_in_and_come_out_as_they_are(
    containers: Containers, real: str, tmp_path: Path
) -> None:
    given, taken = tmp_path / "given", tmp_path / "taken"
    (given / "deep").mkdir(parents=True)
    (given / "deep" / "data").write_bytes(BYTES)
    (given / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (given / "run.sh").chmod(0o755)
    container = await containers.take(ContainerSpec(real))
    await container.copy_in(given, "/a/new/place")
    await container.copy_in(given / "run.sh", "/one")
    done = await container.run(["sh", "-c", "/a/new/place/run.sh && /one; stat -c %u /one"])
    assert done == (0, "ran\nran\n0\n", "")
    await container.run(["sh", "-c", "ln -s /etc /a/new/place/link; ln -s ../../x /a/new/place/up"])
    assert await container.copy_out("/a/new/place", taken)
    assert (taken / "deep" / "data").read_bytes() == BYTES
    assert os.access(taken / "run.sh", os.X_OK)
    assert sorted(path.name for path in taken.iterdir()) == ["deep", "run.sh"]  # and no link
    assert not await container.copy_out("/nowhere", tmp_path / "nothing")
    await container.discard()


async def test_a_program_that_is_late_is_killed_with_all_that_it_started(
    containers: Containers, real: str
) -> None:
    container = await containers.take(ContainerSpec(real))
    with pytest.raises(TimeoutError):
        await container.run(["sh", "-c", "(sleep 1111 &); sleep 2222"], timeout=1.0)
    done = await container.run(["ps"])
    assert (done.status, "1111" in done.stdout, "2222" in done.stdout) == (0, False, False)
    await container.discard()


async def test_input_and_variables(containers: Containers, real: str) -> None:
    """Output is complete, whether or not a program reads its input."""
    container = await containers.take(ContainerSpec(real))
    for size in (1, 50_000, 300_000):
        given = {"env": {"LINES": "a\nb", "PATH": "/bin"}, "stdin": b"x" * size}
        read, ignored = await asyncio.gather(
            container.run(["sh", "-c", 'wc -c; echo "$LINES"'], **given),
            container.run(["echo", "fine"], **given),
        )
        assert read.stdout == f"{size}\na\nb\n"
        assert ignored == (0, "fine\n", "")
    with pytest.raises(ContainerError, match="HOME has several lines"):
        await container.run(["true"], env={"HOME": "a\nb"})
    await container.discard()


async def test_containers_are_ready_and_are_never_used_twice(
    containers: Containers, real: str
) -> None:
    spec = ContainerSpec(real)
    containers.expect(spec, 2)
    await containers.ready(spec)
    before = set(left_of(containers.cli.owner))
    assert len(before) == 2
    taken = [await containers.take(spec) for _ in range(4)]
    assert len({container.name for container in taken}) == 4
    await asyncio.gather(*(container.discard() for container in taken))
    with pytest.raises(ContainerError, match=r"the container is gone|was ended"):
        await taken[0].check()


async def test_one_that_was_removed_while_it_waited_is_not_given_out(
    containers: Containers, real: str
) -> None:
    spec = ContainerSpec(real)
    containers.expect(spec, 1)
    await containers.ready(spec)
    podman("rm", "--force", *left_of(containers.cli.owner))
    container = await containers.take(spec)
    assert (await container.run(["echo", "fine"])).stdout == "fine\n"
    await container.discard()


async def test_an_image_is_built_once_for_the_same_files(
    containers: Containers, real: str, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {real}\nRUN echo built > /app/x\nCOPY y /app/y\n")
    (tmp_path / "y").write_bytes(BYTES)
    first, same = await asyncio.gather(containers.build(tmp_path), containers.build(tmp_path))
    container = await containers.take(ContainerSpec(first, folder="/app"))
    assert (await container.run(["sh", "-c", "cat x; wc -c <y"])).stdout == f"built\n{len(BYTES)}\n"
    await container.discard()
    (tmp_path / "y").write_text("changed")
    other = await containers.build(tmp_path)
    assert (first == same, first == other) == (True, False)
    podman("rmi", first, other)


async def test_an_image_that_cannot_be_built_is_a_sentence(
    containers: Containers, real: str, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {real}\nRUN echo no luck; false\n")
    with pytest.raises(ContainerError, match=r"cannot be built: .*(exit status|code:) 1") as raised:
        await containers.build(tmp_path)
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    with pytest.raises(ContainerError, match="there is no Other in"):
        await containers.build(tmp_path, "Other")


async def test_a_full_disk_is_a_sentence(containers: Containers, real: str) -> None:
    container = await containers.take(ContainerSpec(real, disk_mb=50))
    one = "dd if=/dev/zero of=/f$i bs=1M count=20 2>/dev/null; i=$((i+1))"
    fill = f"i=0; while :; do {one}; sleep 0.1; done"
    with pytest.raises(ContainerEnded, match="wrote more than 50 MB to its container's disk"):
        await container.run(["sh", "-c", fill], timeout=40.0)
    await container.discard()
