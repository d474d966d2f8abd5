"""What child processes are started with."""

from __future__ import annotations

import os

import pytest

from agentrl.base.processes import PARENT, environment


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
