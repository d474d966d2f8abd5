"""What child processes are started with."""

from __future__ import annotations

import os

import pytest

from agentrl.processes import PARENT, environment


def test_threads_sleep_while_they_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment()["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_child_knows_its_parent_and_all_that_the_parent_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGENTRL_STORE_TOKEN", "secret")
    monkeypatch.setenv(PARENT, "1")
    made = environment()
    assert made[PARENT] == str(os.getpid())
    assert made["AGENTRL_STORE_TOKEN"] == "secret"
