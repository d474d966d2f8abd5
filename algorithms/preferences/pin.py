"""Pin the version of a run's data set from its first start to its end."""

from __future__ import annotations

from msgspec.structs import replace

from agentrl.config import RunConfig, from_store  # before the table, which its schema imports

# isort: split
from agentrl.errors import ConfigError
from agentrl.store.base import Store


async def pin_dataset(store: Store, config: RunConfig) -> RunConfig:
    """The settings with a fixed version of the data set: that of a started run, or the newest.

    Raises ConfigError for a data set or version that the store does not have."""
    data = config.data
    if not data.name:
        return config
    versions = [row.version for row in await store.datasets(data.name) if row.digest]
    state = await store.run(config.name)
    if not data.version and state is not None and state.step:
        data = from_store(state.config).data
    version = data.version or max(versions, default=0)
    if version not in versions:
        known = ", ".join(map(str, versions)) or "none"
        raise ConfigError(
            f"data.name = {data.name!r}: the store {config.store} has no such version (complete "
            f"ones: {known}); make one with `agentrl data mine` or `import`"
        )
    pinned: RunConfig = replace(config, **{"data": replace(data, version=version)})
    return pinned
