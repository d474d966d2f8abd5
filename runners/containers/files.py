"""Files to and from a container, as the archives that `docker cp` reads and writes."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath


def pack(source: Path, inside: str, archive: Path) -> None:
    """Archive a file, or what is in a folder, for its place `inside` of a container. Root owns the
    files there."""
    place = PurePosixPath(inside.lstrip("/"))

    def as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(archive, "w") as tar:
        if source.is_dir():
            for path in sorted(source.iterdir()):
                tar.add(path, str(place / path.name), filter=as_root)
            if not any(source.iterdir()):
                tar.add(source, str(place), recursive=False, filter=as_root)
        else:
            tar.add(source.resolve(), str(place), filter=as_root)


def unpack(archive: Path, target: Path) -> None:
    """Extract the one file or folder of an archive as `target`. Only files and folders: an agent
    may have made links that lead elsewhere."""
    with tarfile.open(archive) as tar:
        for member in tar:
            _, *below = PurePosixPath(member.name.removeprefix("/")).parts or ("",)
            if ".." in below:
                continue
            path = target.joinpath(*below)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif member.isfile() or member.islnk():  # a file with two names
                if (data := tar.extractfile(member)) is None:
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(data, file)
                path.chmod(member.mode & 0o777 | 0o600)
