"""`agentrl skill`: it is where each program looks for it, and has what they ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli


def run(*words: str) -> str:
    result = CliRunner().invoke(cli, ["skill", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_begins_as_agentskills_io_asks() -> None:
    start, head, body = run().split("---\n", 2)
    assert start == ""
    assert [line.partition(":")[0] for line in head.splitlines()] == ["name", "description"]
    assert "name: agentrl\n" in head
    assert len(head) < 1024
    assert len(body.splitlines()) < 500


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["claude"], ".claude/skills"),
        (["claude", "--user"], "home/.claude/skills"),
        (["codex"], ".agents/skills"),
        (["codex", "--user"], "home/.agents/skills"),
        (["pi", "--user"], "home/.pi/agent/skills"),
    ],
)
def test_it_is_where_the_program_looks(
    words: list[str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / folder / "agentrl" / "SKILL.md"
    file.parent.mkdir(parents=True)
    file.write_text("an older version")
    run(*words)
    assert file.read_text() == run()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_a_line_in_a_projects_page_is_added_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "AGENTS.md"
    page.write_text("# Mine\n")
    for _ in range(2):
        run("agents-md")
    assert page.read_text().startswith("# Mine\n\n")
    assert page.read_text().count(".agents/skills/agentrl/SKILL.md") == 1


def test_what_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".claude").write_text("a file")
    result = CliRunner().invoke(cli, ["skill", "claude"])
    assert "cannot write" in str(result.exception)
