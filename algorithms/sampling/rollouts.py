"""Builds requests for rollouts, without torch, which an evaluation of upstreams does not need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from msgspec.structs import replace

from agentrl.config import RunConfig
from agentrl.types import NewRollout, Purpose, Sampling, Task

STEADY = "one_step_off"  # the overlap whose tokens depend on no timing
URGENT = 1  # priority of rollouts that the loop waits for, above that of prefetched ones


@dataclass(slots=True)
class CandidateInUse:
    """The candidate of newly requested rollouts; None: the agent's own texts."""

    id: str | None = None


def evaluation_rollouts(
    config: RunConfig,
    step: int,
    name: str,
    tasks: Sequence[Task],
    sampling: Sampling,
    seats: Mapping[str, str] = {},
    candidate: str | None = None,
) -> list[NewRollout]:
    """One rollout per task, as the group `<run>/eval/<step>/<name>`. seats: role or policy
    -> policy that plays it."""
    group = f"{config.name}/eval/{step:06d}/{name}"
    return [
        replace(
            new_rollout(config, group, index, task, step, sampling),
            purpose=Purpose.EVAL,
            priority=URGENT,
            seats=dict(seats),
            candidate=candidate,
        )
        for index, task in enumerate(tasks)
    ]


def new_rollout(
    config: RunConfig, group: str, index: int, task: Task, step: int, sampling: Sampling
) -> NewRollout:
    """Build the request for one rollout. Each gets its own seed, or all rollouts of a group would
    be equal."""
    id, seed = f"{group}/{index:04d}", sampling.seed
    # Tokens of vLLM depend on its batches, and generators of requests make it slower.
    if seed is None and (
        config.engine.kind == "embedded" or config.algorithm.async_sampling == STEADY
    ):
        seed = config.seed
    if seed is not None:
        place = id.removeprefix(f"{config.name}/")  # the same in a run of another name
        drawn = blake2b(f"{seed}/{place}".encode(), digest_size=6).digest()
        sampling = replace(sampling, seed=int.from_bytes(drawn))
    return NewRollout(
        id=id,
        run=config.name,
        group=group,
        index=index,
        task=dict(task),
        sampling=sampling,
        step=step,
        max_attempts=config.agent.max_attempts,
        timeout=config.agent.timeout,
    )
