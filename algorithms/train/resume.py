"""Where a run goes on: at its last checkpoint or, where that is damaged, at the one before it.

Always true: nothing is taken back in the store before an earlier checkpoint is found to be whole.
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
    """The state of the run once its newest whole checkpoint is loaded; what was trained after that
    is taken back. Raises DamagedError where none is whole."""
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
