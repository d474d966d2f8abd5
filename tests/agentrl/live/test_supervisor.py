"""How the processes of a live run are stopped."""

from __future__ import annotations

import signal
from pathlib import Path

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
