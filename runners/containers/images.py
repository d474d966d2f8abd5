"""Images: built from folders once, known by the content of the folder."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentrl.base import threads
from agentrl.runners.containers.cli import Cli, ContainerError

T = TypeVar("T")
REPOSITORY = "agentrl-build"  # of built images; the tag is a digest
PULL_TIMEOUT = 600.0  # seconds


class ImageConfig(msgspec.Struct):
    """What an image says of itself, as `docker image inspect` shows it."""

    entrypoint: list[str] | None = msgspec.field(default=None, name="Entrypoint")
    command: list[str] | None = msgspec.field(default=None, name="Cmd")


class Images:
    """Concurrent calls for the same image share the work; after a failure it is tried again."""

    def __init__(self, cli: Cli, options: Sequence[str] = ()) -> None:
        """`options`: additional arguments of `docker build`."""
        self._cli, self._options = cli, options
        self._building: dict[str, asyncio.Task[str]] = {}
        self._configs: dict[str, asyncio.Task[ImageConfig]] = {}

    async def build(
        self,
        folder: Path,
        dockerfile: str = "Dockerfile",
        args: Mapping[str, str] | None = None,
        timeout: float = PULL_TIMEOUT,
    ) -> str:
        """Return the name of an image made from `folder`, which exists already if its files are the
        same as then. Raises ContainerError."""
        digest = await threads.call(_digest, folder, dockerfile, args or {}, self._options)
        name = f"localhost/{REPOSITORY}:{digest}"
        return await _shared(
            self._building, name, self._build(name, folder, dockerfile, args or {}, timeout)
        )

    async def _build(
        self, name: str, folder: Path, dockerfile: str, args: Mapping[str, str], timeout: float
    ) -> str:
        if not (await self._cli.ask("image", "inspect", name)).status:
            return name
        given = [word for pair in args.items() for word in ("--build-arg", "=".join(pair))]
        said = await self._cli.ask(
            *("build", "--tag", name, "--file", str(folder / dockerfile)),
            *(*given, *self._options, str(folder)),
            timeout=timeout,
            ends=True,
        )
        if said.status:
            raise ContainerError(f"the image of {folder} cannot be built: {said.problem}")
        return name

    async def config(self, image: str) -> ImageConfig:
        """What an image says of itself; it is pulled if it is not here. Raises ContainerError."""
        return await _shared(self._configs, image, self._config(image))

    async def _config(self, image: str) -> ImageConfig:
        how = ("image", "inspect", "--format", "{{json .Config}}", image)
        said = await self._cli.ask(*how)
        if said.status:
            pulled = await self._cli.ask("pull", "--quiet", image, timeout=PULL_TIMEOUT)
            if pulled.status:
                why = f"neither here nor can it be pulled: {pulled.problem}"
                raise ContainerError(f"there is no image {image!r}, {why}")
            said = await self._cli.ask(*how)
        try:
            return msgspec.json.decode(said.out, type=ImageConfig)
        except msgspec.DecodeError:
            raise ContainerError(f"the image {image!r} cannot be read: {said.problem}") from None


async def _shared(tasks: dict[str, asyncio.Task[T]], key: str, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a task that several may wait for, and that none of them cancels."""
    if (task := tasks.get(key)) is None:
        task = tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda task: _forget_failed(tasks, key, task))
    else:
        work.close()
    return await asyncio.shield(task)


def _forget_failed(tasks: dict[str, asyncio.Task[T]], key: str, task: asyncio.Task[T]) -> None:
    if task.cancelled() or task.exception():
        del tasks[key]


def _digest(folder: Path, dockerfile: str, args: Mapping[str, str], options: Sequence[str]) -> str:
    """Hash names, modes and contents of a folder's files, and how the image is built from them."""
    if not (folder / dockerfile).is_file():
        raise ContainerError(f"there is no {dockerfile} in {folder}, so no image can be built")
    known = hashlib.sha256(msgspec.json.encode([dockerfile, sorted(args.items()), *options]))
    try:
        for parent, folders, files in os.walk(folder):
            folders.sort()
            for name in sorted([*files, *folders]):
                path = Path(parent, name)
                head = [str(path.relative_to(folder)), path.lstat().st_mode]
                if path.is_symlink():
                    content = os.fsencode(path.readlink())
                else:
                    content = path.read_bytes() if path.is_file() else b""
                known.update(msgspec.json.encode([*head, len(content)]) + content)
    except OSError as error:
        raise ContainerError(f"{folder} cannot be read: {error.strerror or error}") from None
    return known.hexdigest()[:32]
