"""Two run files share no run by accident: those that name none have the names of their folders."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from agentrl import trainer
from agentrl.base.threads import run_blocking
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.store import open_store


def check_name(config: RunConfig) -> None:
    """Raises ConfigError if the run of this name is that of another run file, which still exists:
    one that was moved or renamed goes on with its run. Other mistakes of a copy come first."""
    other = run_blocking(_stored(config)) if config.file else ""
    if other not in ("", config.file) and Path(other).is_file():
        if config.tasks.train:  # else there is little that could be mistyped
            trainer.check(config)
        raise ConfigError(
            f"run {config.name!r} in {config.output} is that of {other}: give name=NAME for a run"
            f" of its own, or name={config.name} to go on with that one"
        )


async def _stored(config: RunConfig) -> str:
    """The run file of the run in the store; "": there is none, or it has named the run itself."""
    with suppress(StoreError):
        async with open_store(config.store, create=False) as store:
            state = await store.run(config.name)
            return str(state.config.get("file", "")) if state else ""
    return ""
