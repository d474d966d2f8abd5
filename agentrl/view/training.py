"""Keep with a run from which code it was started: the commit of the folder of its run file."""

from __future__ import annotations

import asyncio
import subprocess

from agentrl import __version__
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.types import Json

DOCUMENTS = "origin"  # the kind, with one for each commit
GIT_TIMEOUT = 5.0  # seconds


class RunOrigin(Feature):
    async def start(self, run: ServedRun) -> None:
        found = await asyncio.to_thread(origin, run.config.root)
        if found:
            await run.store.put_documents(run.config.name, DOCUMENTS, found)


def origin(root: str) -> dict[str, Json]:
    """The commit of a folder, with whether files were changed since; {} if git knows none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", root, *safe, *arguments]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT
        )
        return done.stdout.strip()

    # No program is run that the settings of the repository name.
    safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        commit = git("rev-parse", "HEAD")
        for name in git("config", "--name-only", "--list").splitlines():
            if name.startswith("filter."):
                value = "false" if name.endswith(".required") else ""
                safe += ["-c", f"{name}={value}"]
        changed = bool(git("status", "--porcelain", "--untracked-files=no", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {commit: {"changed": changed, "agentrl": __version__}}
