"""The page's script, which writes tasks from rows that name an image."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import AgentRLError
from tests.agentrl.harbor.test_harbor import rollout as rollout
from tests.agentrl.harbor.test_recipe import PAGE
from tests.runners.executors import real
from tests.runners.executors.real import imported, needs_podman

pytestmark = [
    *(needs_podman, pytest.mark.timeout(300), pytest.mark.slow),
    pytest.mark.skipif(not shutil.which("git"), reason="needs git"),
]
CALC = "add() { echo $(($1 - $2)); }\n"
OLD = "case $1 in old) true;; *) echo no test $1; exit 2;; esac\n"
NEW = '. ./calc.sh\ncase $1 in old) true;; new) [ "$(add 1 2)" = 3 ];; esac\n'


def git(folder: Path, *arguments: str) -> str:
    own = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *own, *arguments], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode()


def made(folder: Path, busybox: bytes, name: str) -> dict[str, Any]:
    """Build an image with a repository and git; return a row about it."""
    repo = folder / name
    repo.mkdir(parents=True)
    git(repo, "init", "-q")
    files = {"calc.sh": CALC, "check": OLD, "name": name}
    for file, text in files.items():
        (repo / file).write_text(text)
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "first")
    patches = {}
    for key, file, text in (("patch", "calc.sh", CALC.replace("-", "+")), ("test", "check", NEW)):
        (repo / file).write_text(text)
        patches[key] = git(repo, "diff")
        git(repo, "checkout", "-q", ".")
    layer = io.BytesIO(busybox)
    with tarfile.open(fileobj=layer, mode="a") as tar:
        program = str(shutil.which("git"))
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in {program, *re.findall(r"(/\S+) \(", said)}:
            tar.add(Path(path).resolve(), path.lstrip("/"))
        tar.add(repo, "testbed", filter=_as_root)
    return {
        "instance_id": name, "docker_image": imported(f"agentrl-row-{name}", layer.getvalue()),
        "base_commit": git(repo, "rev-parse", "HEAD").strip(),
        "problem_statement": f"add of {name} subtracts.", "patch": patches["patch"],
        "test_patch": patches["test"], "FAIL_TO_PASS": '["new"]', "PASS_TO_PASS": ["old"],
    }  # fmt: skip


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    return member


async def test_rows_that_name_an_image(
    rollout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[bytes] = []
    with monkeypatch.context() as kept:
        kept.setattr(real, "imported", lambda _, layer: layers.append(layer))
        real.busybox_image()
    rows = [made(tmp_path / "repos", layers[0], name) for name in ("one", "two")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    run = "sh -c 'for one; do sh ./check $one || exit 1; done' sh"
    (tmp_path / "rows.py").write_text(script.replace('"python -m pytest -q"', repr(run)))
    written = [sys.executable, "rows.py", "rows.jsonl", str(rollout.folder)]
    subprocess.run(written, cwd=tmp_path, check=True)  # noqa: ASYNC221
    try:
        assert await rollout(name="one") == {"outcome": 1.0}
        assert await rollout(name="two") == {"outcome": 1.0}
        assert await rollout(["cat name"], "Done.", name="two") == {"outcome": 0.0}
        assert rollout.told == "two"
        cheats = "echo true > check; git -c user.name=t -c user.email=t commit -qam x; rm -f name"
        assert await rollout([cheats], name="one") == {"outcome": 0.0}
        with pytest.raises(AgentRLError, match="wrote no reward"):
            await rollout(["rm /usr/bin/git"], name="one")
    finally:
        images = [row["docker_image"] for row in rows]
        real.podman("rmi", "--force", *images, check=False)  # the last one may be in use yet
