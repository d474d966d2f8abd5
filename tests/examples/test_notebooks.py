"""The notebooks of examples/notebooks, and the gallery's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli
from examples.gallery import GALLERY, export
from tests.examples.conftest import EXAMPLES

FOLDER = EXAMPLES / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("file", BOOKS, ids=lambda file: file.stem)
def test_a_notebook_was_run_from_top_to_bottom(file: Path) -> None:
    cells = [c for c in json.loads(file.read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds
    assert file.stat().st_size < 60_000
    assert f"]({file.name})" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("file", BOOKS, ids=lambda file: file.stem)
def test_a_notebook_shows_what_this_version_writes(file: Path, tmp_path: Path) -> None:
    """Who follows it sees the same: files of earlier versions had other names."""
    written = CliRunner().invoke(cli, ["init", str(tmp_path / "mine")]).output.partition(". ")[0]
    for cell in json.loads(file.read_text())["cells"]:
        if cell["cell_type"] == "code" and "agentrl init mine" in "".join(cell["source"]):
            assert "".join(cell["outputs"][0]["text"]).startswith(written)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("file", BOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path) -> None:
    if find_spec("nbclient") is None:
        pytest.skip("needs nbclient, of the extra dev")
    if file.stem == "selfplay":
        pytest.importorskip("pyspiel")
    code = f"from execute import *; execute(Path({str(file)!r}))"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    paths = [str(FOLDER), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PATH": path, "PYTHONPATH": ":".join(paths), "HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.slow
def test_an_example_of_the_gallery_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all((EXAMPLES / name / "policy.py").is_file() for name in GALLERY)
    monkeypatch.chdir(tmp_path)
    short = ["steps=1", "eval.tasks=2", "algorithm.groups=2", "algorithm.group_size=2"]
    file = export("team", tmp_path / "gallery", *short, "output=runs/team")
    page = file.read_text()
    assert "team/train/g0000000" in page
    assert 'src="http' not in page
    assert 'href="http' not in page
