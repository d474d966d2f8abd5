import asyncio
import inspect
import pkgutil
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from agentrl.cli import COMMANDS, CommandGroup, _docstring, main
from agentrl.cli.main import cli
from agentrl.core.config import load
from agentrl.core.errors import StoreError, install_command
from agentrl.core.processes import USER_ERROR
from agentrl.store import open_store
from tests import warm
from tests.factories import refused, run_folder


def agentrl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "agentrl", *arguments, cwd=cwd, timeout=60)


def test_the_list_of_commands_has_whole_sentences() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).output.partition("Commands:")[2]
    text = " ".join(shown.split())
    assert "..." not in text
    assert "Print whether RUN learned and, if not, why: most likely reasons first" in text
    assert "The algorithm process" not in text  # which people do not start


def test_commands_are_where_the_table_says() -> None:
    for path in COMMANDS:
        *groups, name = path.split()
        found: click.Command | None = cli
        for word in (*groups, name):
            assert isinstance(found, CommandGroup), path
            found = found.get_command(click.Context(found), word)
        assert isinstance(found, click.Command), path
        assert found.name == name


def test_help_without_an_import_says_what_the_command_says() -> None:
    for path, place in COMMANDS.items():
        command = pkgutil.resolve_name(place)
        assert _docstring(*place.split(":")) == inspect.cleandoc(command.help), path
        assert not command.hidden, path


def test_dry_run_prints_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("seed = 1\n")
    arguments = [
        "train",
        str(tmp_path / "run.toml"),
        "algorithm.lr=0.5",
        "--steps",
        "3",
        "--dry-run",
    ]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    (tmp_path / "again.toml").write_text(result.output)
    config = load(tmp_path / "again.toml")
    assert (config.seed, config.steps, config.algorithm.lr) == (1, 3, 0.5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.preset=grpoo", "did you mean 'grpo'"),
        ("algorithm.preset=ppo", "set critic.model"),
        ("algorithm.options.clipp=0.1", "did you mean 'clip_low'"),
        ("critic.model=shared", "critic.model is set, and algorithm.preset = 'auto' reads no"),
    ],
)
def test_dry_run_refuses_what_training_would(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "run.toml").write_text("seed = 1\n")
    result = CliRunner().invoke(cli, ["train", str(tmp_path / "run.toml"), override, "--dry-run"])
    assert message in str(result.exception)
    assert result.output == ""


FAR = 'upstreams.far.base_url="http://127.0.0.1:9/v1"'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path)


MISTAKES = [
    ("run.toml", "stepps = 3", [], "unknown key 'stepps'; did you mean 'steps'?"),
    ("tasks.jsonl", '{"input": 1}\n{', [], "tasks.jsonl:2 is not a JSON object"),
    ("x", "", ["agent.path=agnet.py:agent"], "there is no file"),
    ("x", "", ["verifier.path=check.py:verify"], "there is no file"),
    ("x", "", ["tasks.train="], "tasks.train is missing"),
    ("x", "", ["policy.model="], "policy.model is missing"),
    ("x", "", ["policy.model=", FAR], "scores what [upstreams] answer; to train, give"),
    ("x", "", ["store=mysql://x"], "mysql"),
    ("x", "", ["output=run.toml/below"], "output: cannot make the folder"),
    ("x", "", ["store=other.db", "--fresh"], "--fresh: the store other.db is not in"),
]


@pytest.mark.parametrize(("file", "text", "overrides", "sentence"), MISTAKES)
def test_user_errors_are_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, overrides: list[str],
    sentence: str,
) -> None:  # fmt: skip
    (folder / file).write_text(text)
    monkeypatch.chdir(folder)
    assert sentence in refused("train", "run.toml", *overrides)


def test_a_user_error_ends_the_process_with_exit_code_two(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text('{"input": 1}\n{')
    result = agentrl("train", "run.toml", cwd=folder)
    assert result.returncode == 2, result.stderr
    assert "tasks.jsonl:2 is not a JSON object" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_endpoints_answer_alone_has_no_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    said = refused("eval", "run.toml", "policy.model=", FAR, ".")
    assert "[upstreams] answer every call, so a checkpoint has no effect" in said


def test_show_names_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    arguments = ["show", "run/train/g0000000/0000"]
    assert str(folder / "runs" / "run" / "store.db") in refused(*arguments)
    asyncio.run(open_store(str(folder / "new.db")).close())
    said = refused(*arguments, "--store", "new.db")
    assert "no rollout 'run/train/g0000000/0000'" in said


def test_an_extra_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ""

    def command(**_: object) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(main, "seal", lambda: None)
    monkeypatch.setattr(main, "cli", command)
    missing = "torch"
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == USER_ERROR
    assert f"torch is missing: {install_command('train')}" in capsys.readouterr().err
    missing = "mine"
    with pytest.raises(ModuleNotFoundError):
        main.main()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train run.toml", "Stopped. The same command continues after the last checkpoint."),
        ("train run.toml --fresh", "Stopped. The same command without --fresh continues after"),
        ("train --from=4 run.toml", "Stopped. The same command without --from continues after"),
        (
            "eval run.toml --crossplay",
            "Stopped. The same command continues with the games that are left.",
        ),
        ("eval run.toml", "Stopped.\n"),
        ("data import d f.jsonl", "Stopped.\n"),
    ],
)
def test_ctrl_c_says_what_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main.cli, "main", interrupted)
    monkeypatch.setattr(main, "seal", lambda: None)
    monkeypatch.setattr("sys.argv", ["agentrl", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
    assert said in capsys.readouterr().err


def test_a_folder_is_no_store_and_view_finds_those_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.store.run_folder import places

    (tmp_path / "runs" / "a").mkdir(parents=True)
    file = tmp_path / "runs" / "a" / "store.db"
    open_store(str(file))
    for options in ({}, {"create": False}, {"readonly": True}):
        with pytest.raises(StoreError, match=rf"runs is a folder: name the file .* {file}\."):
            open_store(f"sqlite:///{tmp_path / 'runs'}", **options)
    shown = list[list[str]]()
    monkeypatch.setattr(
        "agentrl.view.server.run",
        lambda given, *_, **__: shown.append([place.url for place in places(given)]),
    )
    for where in (file.parent, file.parent.parent):
        assert CliRunner().invoke(cli, ["view", str(where)]).exit_code == 0
    assert shown == [[f"sqlite:///{file}"]] * 2
    (tmp_path / "runs" / "b").mkdir()
    other = tmp_path / "runs" / "b" / "store.db"
    open_store(str(other))
    assert CliRunner().invoke(cli, ["view", str(tmp_path / "runs")]).exit_code == 0
    assert shown[-1] == [f"sqlite:///{file}", f"sqlite:///{other}"]
    failed = CliRunner().invoke(cli, ["view", str(tmp_path / "runs"), "--export", "x.html"])
    assert "2 stores were found: choose a run with --run" in str(failed.exception)
    monkeypatch.chdir(tmp_path)
    failed = CliRunner().invoke(cli, ["view", "--run", "none"])
    assert f"no other store below {tmp_path} has a run 'none'" in str(failed.exception)
