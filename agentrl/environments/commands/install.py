"""`agentrl env install`: an interpreter for a plug-in, with all that it needs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from agentrl.config.derived import Named
from agentrl.environments.reference import load_class
from agentrl.errors import ConfigError

APART = "--no-deps "  # begins a line of `requires` whose own requirements are not installed
CPU = "https://download.pytorch.org/whl/cpu"  # torch without 3 GB of CUDA


def install(plugin: str, into: Path | None, python: str, say: Callable[[str], None]) -> Path:
    """Make or repair the plug-in's interpreter, and return its folder. Raises ConfigError."""
    named = Named.read(f"{plugin}:", {})
    folder, requires = into or Path(named.folder), load_class(named).requires
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise ConfigError(f"{folder} is there and is no virtual environment; give another --into")
    if not (folder / "bin/python").exists():
        say(f"making {folder}")
        _run([python, "-m", "venv", str(folder)], f"{folder} cannot be made with {python}")
    plain = [line for line in requires if not line.startswith(APART)]
    apart = [line.removeprefix(APART) for line in requires if line.startswith(APART)]
    own = own_requirement()
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    bound = torch_first(pip, plain, say) if plain else []
    say(f"installing {', '.join([*own[-1:], *plain])}")
    _run([*pip, *bound, *own, *plain], f"what {plugin} needs cannot be installed")
    if apart:
        say(f"installing {', '.join(apart)} without what they require")
        _run([*pip, "--no-deps", *apart], f"what {plugin} needs cannot be installed")
    code = "import agentrl.environments.helper"
    _run([str(folder / "bin/python"), "-P", "-c", code], f"agentrl does not work in {folder}")
    return folder


def own_requirement() -> list[str]:
    """Arguments of pip that install agentrl as it is installed here: the same checkout, file or
    version."""
    installed = distribution("agentrl")
    origin: dict[str, Any] = msgspec.json.decode(installed.read_text("direct_url.json") or "{}")
    url = urlsplit(origin.get("url", ""))
    if url.scheme != "file":
        return [f"agentrl=={installed.version}"] if not origin else [f"agentrl @ {origin['url']}"]
    path = unquote(url.path)
    if not Path(path).exists():
        raise ConfigError(f"agentrl was installed from {path}, which is gone; install it again")
    return ["-e", path] if origin.get("dir_info", {}).get("editable") else [path]


def torch_first(pip: Sequence[str], wanted: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Install torch without CUDA if something requires it; return arguments that keep it."""
    asked = [*pip, "--dry-run", "--ignore-installed", "--report", "-", *wanted]
    report = _run(asked, "what the plug-in needs cannot be resolved")
    try:
        found = msgspec.json.decode(report)["install"]
        names = {one["metadata"]["name"].lower() for one in found}
    except (msgspec.DecodeError, LookupError, TypeError):
        raise ConfigError("pip gave no report of what it would install; update it") from None
    if "torch" not in names:
        return []
    pin = f"torch=={torch_version()}" if torch_version() else "torch"
    say(f"installing {pin} without CUDA")
    # Whoever has set an index of their own knows where torch comes from.
    given = _run([*pip[:3], "config", "list"], "pip has no configuration")
    index = (
        {}
        if "index-url" in given + " ".join(os.environ).lower().replace("_", "-")
        else {"PIP_EXTRA_INDEX_URL": CPU}
    )
    _run([*pip, pin], f"{pin} cannot be installed", **index)
    return [pin]


def torch_version() -> str:
    """The version of torch here, without its build; empty if there is none."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return ""


def _run(command: Sequence[str], problem: str, **variables: str) -> str:
    """What a program prints. Raises ConfigError with the last line of its errors."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | variables, check=False
        )
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["?"]
        raise ConfigError(f"{problem}: {errors[-1].removeprefix('ERROR: ')}")
    return done.stdout
