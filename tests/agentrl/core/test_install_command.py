"""The command that adds an extra does so in the installation that prints it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.core.errors import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'agentrl[view]'"),
        (
            {"url": "file:///home/me/agentrl", "dir_info": {"editable": True}},
            "pip install -e '/home/me/agentrl[view]'",
        ),
        ({"url": "file:///a%20b/agentrl", "dir_info": {}}, "pip install '/a b/agentrl[view]'"),
        (
            {"url": "file:///tmp/agentrl-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/agentrl-0.1.0-py3-none-any.whl[view]'",
        ),
        (
            {"url": "https://host/agentrl.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "pip install 'agentrl[view] @ git+https://host/agentrl.git'",
        ),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None, command: str
) -> None:
    text = None if origin is None else json.dumps(origin)
    installed = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert install_command("view") == command


def test_the_name_of_the_distribution_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION


def test_no_page_installs_another_projects_package() -> None:
    """The name on the index is not this project's: pages install from the clone."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.ipynb", "*.toml", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [file for file in listed.stdout.split() if not file.startswith("tests/")]
    wrong = re.compile(r"(pip|uv) (install|add)[^`\n]*[ '\"]agentrl([\[ '\"`]|$)", re.MULTILINE)
    assert files
    assert not [file for file in files if wrong.search((ROOT / file).read_text())]
