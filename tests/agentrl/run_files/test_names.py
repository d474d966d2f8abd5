"""Two run files share no run by accident."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.config import RunConfig, load
from agentrl.errors import ConfigError
from agentrl.run_files import names
from agentrl.store import open_store


def start(file: Path, *overrides: str) -> None:
    names.check_name(load(file, overrides))


async def opened(config: RunConfig) -> None:
    async with open_store(config.store) as store:
        await store.open_run(config.name, msgspec.to_builtins(config))


def test_run_files_of_one_folder_name_share_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of two folders of one name, but not what was moved or renamed."""
    monkeypatch.chdir(tmp_path)
    first, beside, copied = (
        tmp_path / name for name in ("mine/run.toml", "mine/b.toml", "copy/mine/run.toml")
    )
    for file in (first, beside, copied):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        start(file)  # before there is a run
    config = load(first)
    Path(config.output).mkdir(parents=True)
    asyncio.run(opened(config))
    for file in (beside, copied):
        with pytest.raises(ConfigError) as refused:
            start(file)
        assert str(refused.value) == (
            f"run 'mine' in {config.output} is that of {first}: give name=NAME for a run of its"
            " own, or name=mine to go on with that one"
        )
        for option in ([], ["--fresh"], ["--from", "0"], ["--take-over"]):
            said = CliRunner().invoke(cli, ["train", str(file), *option])
            assert isinstance(said.exception, ConfigError)
            assert "is that of" in str(said.exception)
        start(file, "name=mine")
        start(file, "name=other")
    start(first)
    first.rename(first.with_name("renamed.toml"))
    start(first.with_name("renamed.toml"))
    start(copied)


def test_a_typo_of_a_copy_is_said_before_the_clash_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '[policy]\nmodel = "m"\n[tasks]\ntrain = "t.jsonl"\n[algorithm]\npreset = "{}"\n'
    first, copied = tmp_path / "run.toml", tmp_path / "copy.toml"
    (tmp_path / "t.jsonl").write_text('{"input": "a"}\n')
    first.write_text(text.format("grpo"))
    config = load(first)
    Path(config.output).mkdir(parents=True)
    asyncio.run(opened(config))
    for preset, said in (("gropo", "did you mean 'grpo'"), ("grpo", "is that of")):
        copied.write_text(text.format(preset))
        with pytest.raises(ConfigError, match=said):
            start(copied)
