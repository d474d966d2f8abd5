"""Coroutines from blocking code."""

from __future__ import annotations

import pytest

from agentrl.base.threads import run_blocking


async def fail() -> None:
    raise ValueError("the user's error")


def test_an_error_has_no_other_exception_as_its_context() -> None:
    """Else a traceback shows first that no event loop was running, which tells a user nothing."""
    with pytest.raises(ValueError, match="the user's error") as failed:
        run_blocking(fail())
    assert failed.value.__context__ is None


async def test_it_also_runs_in_an_event_loop_as_in_a_notebook() -> None:
    with pytest.raises(ValueError, match="the user's error"):
        run_blocking(fail())
