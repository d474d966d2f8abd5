"""What child processes are started with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.base.processes import PARENT, Child, environment


def test_threads_soon_sleep_while_they_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert environment()["GOMP_SPINCOUNT"] == "20000"
    assert environment()["MKL_CBWR"].endswith("STRICT")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert environment()["GOMP_SPINCOUNT"] == "7"


def test_a_child_knows_its_parent_and_all_that_the_parent_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGENTRL_STORE_TOKEN", "secret")
    monkeypatch.setenv(PARENT, "1")
    made = environment()
    assert made[PARENT] == str(os.getpid())
    assert made["AGENTRL_STORE_TOKEN"] == "secret"


def test_the_error_that_ended_a_process_is_read_from_its_log(tmp_path: Path) -> None:
    child = Child("algorithm", [], tmp_path / "algorithm.log")
    child.log.write_text("INFO started\n")
    assert child.last_exception() is None
    first = "Traceback (most recent call last):\n  File 'a.py', line 1, in f\nKeyError: 'old'\n"
    last = "Traceback (most recent call last):\n  File 'b.py', line 2, in g\n    x.y\n      ^^\n"
    child.log.write_text(f"{first}INFO went on\n{last}AttributeError: no attribute 'y'\nINFO bye\n")
    assert child.last_exception() == "AttributeError: no attribute 'y'"
