"""Resuming a run from its last checkpoint or, if that is damaged, from the one before it.

Always true: the store is rewound only after an earlier checkpoint was loaded without an error.
"""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec.structs import replace

from agentrl.algorithms.train.checkpoint import earlier_checkpoints, load_checkpoint, parse_name
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.config import RunConfig
from agentrl.errors import DamagedError
from agentrl.store.base import Store
from agentrl.types import RunState

log = logging.getLogger("agentrl.algorithms")


async def resume_run(store: Store, config: RunConfig, state: RunState, team: PolicySet) -> RunState:
    """Load the newest undamaged checkpoint; returns the run's state at that step. Steps after it
    are rewound in the store. Raises DamagedError if every checkpoint is damaged."""
    if state.checkpoint is None:
        return state
    last = config.checkpoint(state.checkpoint)
    try:
        team.restore(load_checkpoint(last, team))
        return state
    except DamagedError as error:
        log.warning("%s", error)
        damage = error
    for path in earlier_checkpoints(Path(config.output, "checkpoints"), last, state.identity):
        try:
            team.restore(load_checkpoint(path, team))
        except DamagedError as error:
            log.warning("%s", error)
        else:
            return await _rewind(store, state, path)
    raise DamagedError(
        f"{damage}. No earlier one is whole: put a copy in its place, name one with `agentrl train "
        "--from PATH`, or train from the start with --from 0"
    )


async def _rewind(store: Store, state: RunState, path: Path) -> RunState:
    found = parse_name(path)
    assert found is not None
    steps, name = found[0], f"checkpoints/{path.name}"
    log.warning("Going on from %s: %d steps are trained again.", path, state.step - steps)
    await store.rewind(state.run, state.epoch, steps, name)
    taken = {"steps/taken_back": float(state.step - steps)}
    await store.log(state.run, steps, taken, epoch=state.epoch)
    return replace(state, step=steps, checkpoint=name)
