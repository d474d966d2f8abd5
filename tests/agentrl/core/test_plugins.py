"""What comes from outside the library is found, or refused with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest

from agentrl.core import plugins
from agentrl.core.errors import ConfigError
from tests.factories import Register

KEY = "runner.executor"


class Runs(Protocol):
    def run(self) -> None: ...


def load(name: str, root: Path = Path()) -> object:
    return plugins.load_plugin("executors", name, ("async", "threads"), root, key=KEY)


def test_a_file_an_entry_point_and_the_librarys_own_are_found(
    tmp_path: Path, register: Register
) -> None:
    (tmp_path / "mine_found.py").write_text("def make(): ...")
    register("agentrl.executors", "slurm", "collections:OrderedDict")
    assert load("async") is None
    assert load("mine_found.py:make", tmp_path).__name__ == "make"  # type: ignore[attr-defined]
    assert load("slurm").__name__ == "OrderedDict"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"runner.executor = 'slrm'; did you mean 'slurm'"):
        load("slrm")


def test_what_hides_the_librarys_own_is_named(register: Register) -> None:
    register("agentrl.executors", "async", "theirs:Pool")
    with pytest.raises(ConfigError, match=r"theirs:Pool .* hides the library's own 'async'"):
        load("command")


def test_what_raises_at_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Register
) -> None:
    (tmp_path / "raises_at_import.py").write_text("x = 1\nraise KeyError('no')")
    monkeypatch.syspath_prepend(tmp_path)
    register("agentrl.executors", "odd", "raises_at_import:make")
    with pytest.raises(ConfigError, match=r"raised KeyError: 'no' .*raises_at_import.py:2\)"):
        load("odd")
    with pytest.raises(ConfigError, match=r"raised KeyError: 'no' .*raises_at_import.py:2\)"):
        load("raises_at_import.py:make", tmp_path)


def test_what_does_not_fit_is_named_with_its_line(tmp_path: Path) -> None:
    source = "number = 1\n\n\ndef make(config):\n    return config\n"
    (tmp_path / "mine_unfit.py").write_text(source)
    with pytest.raises(ConfigError, match="1 is int, not a function or class"):
        plugins.check_call(load("mine_unfit.py:number", tmp_path), "config", key=KEY)
    make = load("mine_unfit.py:make", tmp_path)
    plugins.check_call(make, "config", key=KEY)
    with pytest.raises(ConfigError, match=r"make \(.*mine_unfit.py:4\) must take \(config, root\)"):
        plugins.check_call(make, "config", "root", key=KEY)
    with pytest.raises(ConfigError, match=r"returned dict, which is no Runs: it has no run"):
        plugins.check_protocol({}, Runs, source=make, key=KEY)
