"""Wheel and sdist contain the linked folders as real packages."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import agentrl

ROOT = Path(__file__).parents[1]
EXPECTED = {
    "agentrl/__init__.py",
    "agentrl/py.typed",
    "agentrl/store/base.py",
    "agentrl/runners/gateway/server.py",
    "agentrl/algorithms/train/loop.py",
    "agentrl/algorithms/learners/base.py",
}
DOCUMENTS = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_wheel(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= EXPECTED
    assert f"agentrl-{agentrl.__version__}.dist-info/licenses/LICENSE" in names
    assert any(name.startswith("agentrl/store/sql/") and name.endswith(".sql") for name in names)
    assert not any(
        name.startswith(("store/", "runners/", "algorithms/", "tests/")) for name in names
    )


def test_sdist(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {m.name.split("/", 1)[1]: m for m in archive if "/" in m.name}
    assert set(members) >= EXPECTED | {"examples/staff/run.toml", "constraints.txt", *DOCUMENTS}
    assert not any(member.issym() for member in members.values())


def test_the_version_is_written_once() -> None:
    """In the package; what is released is in the changelog."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "agentrl/__init__.py"
    assert "version" not in project["project"]
    assert f"## [{agentrl.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_docs_are_built_without_a_change_of_the_users_environment(tmp_path: Path) -> None:
    """It may be a plain install, as in the README."""
    target = ["docs", f"VENV={tmp_path / 'venv'}", f"DOCS={tmp_path / 'docs'}"]
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    command = ["make", "--dry-run", "--always-make", *target]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    installs = [line.split("@")[-1] for line in said.splitlines() if "pip install" in line]
    assert [line.split()[0] for line in installs] == [f"{tmp_path / 'docs'}/bin/python"]
    assert " -e " not in installs[0]
    assert "-m mkdocs build" in said
