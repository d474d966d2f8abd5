"""How the processes of a live run are stopped."""

from __future__ import annotations

import signal
from pathlib import Path

from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.errors import ConfigError
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


def test_the_default_preset_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    """It would be by the process that trains, after an address was said to serve."""
    (tmp_path / "shop.toml").write_text('policy.model = "none"\n')
    done = CliRunner().invoke(cli, ["live", str(tmp_path / "shop.toml")])
    assert isinstance(done.exception, ConfigError)
    assert "algorithm.preset = 'auto' compares rollouts of a task" in str(done.exception)
    assert not (tmp_path / "runs").exists()
