"""A process beside a run that reads all there is, prunes what is trained, adds data sets, and plays
and trains a run of its own.

It must not change how the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from agentrl.core.config import RunConfig
from agentrl.core.errors import Conflict, Fenced, Invalid, NotFound
from agentrl.core.types import (
    POLICY,
    Attempt,
    Credit,
    ErrorKind,
    Failure,
    Image,
    NewRollout,
    Outcome,
    PolicyVersion,
    Purpose,
    Reward,
    RolloutState,
    Scope,
    Span,
    StepCommit,
    StepReward,
    Transition,
    float32,
    int32,
)
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.store.records import Item, Judgement, Side
from tests.simulation.actors import opened

if TYPE_CHECKING:
    from tests.simulation.world import World

PAUSE = 1.0  # seconds between two calls, at most
CALLS = 20  # of a process: then it rests, as a run may last for hours
REFUSED = (NotFound, Conflict, Invalid, Fenced)  # what it named is gone, or a late request took it
OWN = "own"  # name of its run
BODY = b"GIF89a"
IMAGE = Image(digest=sha256(BODY).hexdigest(), media_type="image/gif", width=1, height=1, body=BODY)


async def administrator(world: World, config: RunConfig) -> None:
    from tests.simulation.clients import Clients

    draw, does = world.loop.random, [*DOES, *Clients(world, config).does]
    async with open_store(config.store) as store:
        await opened(store, config.name)
        for _ in range(CALLS):
            await asyncio.sleep(PAUSE * draw.random())
            rows = await store.rollouts(config.name)
            rollout = draw.choice(rows).id if rows else ""
            work = draw.choice(does)
            try:
                await work(store, config.name, rollout)
            except REFUSED:
                continue
        await asyncio.Event().wait()


async def look(store: Store, run: str, rollout: str) -> None:
    await store.runs()
    for row in await store.groups(run, purpose=Purpose.TRAIN, limit=3):
        assert len(row.rollouts) == len(row.states)
    if rollout:
        trace = await store.trace(rollout, limit=2)
        outline, attempts = await store.outline(rollout), await store.attempts(rollout, limit=2)
        assert trace is None or (len(outline) >= len(trace.transitions) and attempts)
        await store.credits(rollout)
        await store.calls([rollout])


async def count(store: Store, run: str, rollout: str) -> None:
    names = await store.metric_names(run)
    if names:
        await store.series(run, names[:3], points=2)
    await store.steps(run, limit=2)
    await store.counts(run)
    await store.failures(run)
    await store.stats()
    await store.wait(await store.cursor(), timeout=0.2)


async def search(store: Store, run: str, rollout: str) -> None:
    results = await store.search(
        run, text="task", state=RolloutState.SUCCEEDED, rewards={"outcome": (0.0, None)}, limit=2
    )
    if results.cursor:
        await store.search(run, before=results.cursor, role="agent", limit=2)
    await store.rollouts(run, group_state="trained", after=rollout or None, limit=3)
    await store.rollouts(run, trained=0, state=RolloutState.FAILED)


async def prune(store: Store, run: str, rollout: str) -> None:
    counted = await store.prune(run=run, keep_last=1, dry_run=True)
    if counted.rollouts:
        await store.prune(run=run, keep_last=1)
    await store.forget(["unknown"], dry_run=True)


async def collect(store: Store, run: str, rollout: str) -> None:
    """Make a data set of calls of its own, with a judgement of one."""
    call = Transition(
        id="own", attempt="own", index=0, prompt=int32([1, 2]), completion=int32([3]),
        logprobs=float32([-0.5]),
    )  # fmt: skip
    sides = [Side(digest=f"side-{n}", own=[call]) for n in range(2)]
    item = Item(position=0, kind="pair", chosen="side-0", rejected="side-1")
    version = await store.draft_dataset("pairs", {"of": run})
    await store.add_items("pairs", version, [item], sides)
    await store.commit_dataset("pairs", version)
    assert await store.items("pairs", version) == [item]
    await store.sides(["side-0"])
    await store.datasets("pairs")
    await store.add_logprobs("model", {"side-0": float32([-0.5])})
    assert (await store.logprobs("model", ["side-0"]))["side-0"] == float32([-0.5])


async def note(store: Store, run: str, rollout: str) -> None:
    judgement = Judgement(id=f"judged {rollout}", subject=rollout, judge="judge", verdict=1)
    await store.add_judgements([judgement])
    assert await store.judgement(judgement.id) is not None
    await store.put_documents(run, "note", {rollout or "none": 1})
    assert await store.documents(run, "note")


async def train(store: Store, run: str, rollout: str) -> None:
    """Play and train one group of its own run, and now and then undo that."""
    state = await store.open_run(OWN, {}, owner=OWN, lease=60.0, gone=OWN)
    step, group = state.step, f"{OWN}-{state.step}"
    assert await store.hold_run(OWN, OWN, lease=60.0)
    version = PolicyVersion(
        run=OWN, policy=POLICY, version=step, base_url="http://own/v1", model=""
    )
    await store.publish(version, epoch=state.epoch)
    assert POLICY in await store.policies(OWN)
    new = [
        NewRollout(
            id=f"{group}-{n}", run=OWN, group=group, index=n, task={"input": "own"}, step=step
        )
        for n in range(3)
    ]
    await store.enqueue(new, epoch=state.epoch)
    await store.cancel([new[2].id])
    while attempts := await store.claim(2, runner=OWN, lease=30.0, run=OWN):
        await play(store, attempts)
    if not await store.settled(group, timeout=20.0):
        return
    groups = await store.claim_groups(OWN, state.epoch, 1, timeout=0.0)
    if groups:
        await store.commit_step(committed(groups[0].id, state.epoch, step, groups[0].rollouts))
        await store.add_rewards([StepReward(new[0].id, Reward(1.0, "later"))])
        assert len(await store.images(OWN, [IMAGE.digest])) == 1
    if step % 3 == 2:
        await store.rewind(OWN, state.epoch, step, None)
        await store.prune(run=OWN, older_than=0.0, seconds=0.1)
    if step % 4 == 3:
        await store.forget([new[0].id])
        await store.vacuum()


async def play(store: Store, attempts: list[Attempt]) -> None:
    """Two calls of each attempt, the second with an image; some are scored in a second attempt."""
    await store.put_images(OWN, [IMAGE])
    await store.heartbeat([attempt.id for attempt in attempts], lease=30.0)
    outcomes = []
    for attempt in attempts:
        first, again = [1, 2, 3], [1, 2, 3, 4, 5]
        calls = [
            Transition(
                id=f"{attempt.id}-{n}", attempt=attempt.id, index=n, prompt=int32(prompt),
                completion=int32([4]), logprobs=float32([-0.5]), images=(IMAGE.digest,) * n,
                messages=[{"role": "user", "content": "own"}], answer={"content": "said"},
            )
            for n, prompt in enumerate((first, again))
        ]  # fmt: skip
        await store.add_transitions(calls)
        name = attempt.id[:16]
        span = Span(
            id=name, attempt=attempt.id, parent=None, name="own", kind="agent", start=1, end=2
        )
        await store.add_spans([span])
        if attempt.fence == 1 and attempt.rollout.index == 1:
            await store.finish([Outcome(attempt.id, 1, ran={"said": 1})])
            failure = Failure(ErrorKind.VERIFIER, "not now")
            outcomes.append(Outcome(attempt.id, 1, failure=failure, retry=True))
        else:
            rewards = [Reward(1.0), Reward(0.5, "step", Scope.TRANSITION, calls[0].id)]
            outcomes.append(Outcome(attempt.id, attempt.fence, "said", rewards))
    await store.finish(outcomes)


def committed(group: str, epoch: int, step: int, rollouts: list[Any]) -> StepCommit:
    """A step that trains a group, or discards one without calls."""
    calls = [call.id for row in rollouts for call in row.transitions]
    names = ("psi", "advantage", "baseline", "gate", "weight")
    numbers = dict.fromkeys(names, float32([0.5]))
    return StepCommit(
        run=OWN, epoch=epoch, step=step, groups=[group] if calls else [],
        discarded=[] if calls else [group], versions={POLICY: step + 1}, checkpoint=None,
        metrics={"reward": 1.0},
        credits=[Credit(transition=id, policy=POLICY, **numbers) for id in calls],
        rewards=[StepReward(row.id, Reward(0.1, "given")) for row in rollouts if row.transitions],
    )  # fmt: skip


DOES: list[Callable[[Store, str, str], Awaitable[Any]]] = [
    look,
    count,
    search,
    prune,
    note,
    collect,
    train,
]
