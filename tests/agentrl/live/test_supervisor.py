"""How the processes of a live run are stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.processes import USER_ERROR
from agentrl.live import supervisor
from agentrl.live.bisection import Attempted, StepBisection
from tests.agentrl.live.shop import Shop


async def test_sigterm_stops_the_processes_in_order(tmp_path: Path, tiny_model_dir: Path) -> None:
    shop = Shop(tmp_path, tiny_model_dir, "--only", "gateway")
    await shop.start()
    assert shop.process is not None
    try:
        gateway = await shop.pid("gateway")
        shop.process.send_signal(signal.SIGTERM)
        assert await shop.process.wait() == 0
        assert not Path(f"/proc/{gateway}").exists()
    finally:
        await shop.stop()


class Starts:
    """Stands in for a process that ends at once, by an error that a user must fix."""

    name = "algorithm"

    def __init__(self, then: Callable[[], object]) -> None:
        self.then, self.starts = then, 0

    async def start(self) -> None:
        self.starts += 1

    async def wait(self) -> int:
        self.then()
        return 0 if self.starts == 3 else USER_ERROR

    def last_error(self) -> str:
        return "a session cannot be trained"


@pytest.mark.parametrize("blamed", [False, True])
async def test_the_first_start_of_a_run_also_finds_the_session_that_cannot_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blamed: bool
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.0)
    bisection, said = StepBisection(tmp_path), list[str]()

    def fails() -> None:
        if blamed:
            tried = Attempted(1, [f"s{n}" for n in range(8 // child.starts)])
            bisection.file.write_bytes(msgspec.json.encode(tried))

    def say(text: str, **_: object) -> None:
        said.append(text)
        if len(said) == 3:
            raise asyncio.CancelledError

    child: Any = Starts(fails)
    keeping = supervisor.keep_serving(child, say, bisection.failed)
    with pytest.raises(asyncio.CancelledError if blamed else AgentRLError):
        await keeping
    assert child.starts == (3 if blamed else 1)


def test_the_default_preset_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    """It would be by the process that trains, after an address was said to serve."""
    (tmp_path / "shop.toml").write_text('policy.model = "none"\n')
    done = CliRunner().invoke(cli, ["live", str(tmp_path / "shop.toml")])
    assert isinstance(done.exception, ConfigError)
    assert "algorithm.preset = 'auto' compares rollouts of a task" in str(done.exception)
    assert not (tmp_path / "runs").exists()
