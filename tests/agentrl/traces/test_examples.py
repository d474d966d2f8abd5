"""What the report of a run shows of its rollouts."""

from pathlib import Path

from agentrl.config import resolve
from agentrl.store import open_store
from agentrl.traces import examples
from agentrl.types import ErrorKind, Failure, NewRollout, Outcome, Purpose, Reward, StepRow


async def test_an_example_of_success_has_not_failed(tmp_path: Path) -> None:
    """By `agent.error_reward` it has an outcome all the same."""
    config = resolve({"name": "r", "output": str(tmp_path)}, source="test")
    steps = [StepRow(run="r", step=0, metrics={"eval/score": 0.5}, committed=True, at=0.0)]
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        for index, (failure, value) in enumerate(((True, 1.0), (False, 0.0), (False, 0.5))):
            one = NewRollout(
                id=f"r/eval/000000/score/{index:04d}", run="r", group="r/eval/000000/score",
                index=index, task={}, purpose=Purpose.EVAL,
            )  # fmt: skip
            await store.enqueue([one])
            (attempt,) = await store.claim(1, runner="w", lease=60.0, run="r")
            why = Failure(kind=ErrorKind.AGENT, message="no") if failure else None
            rewards = [Reward(value=value)]
            done = Outcome(attempt=attempt.id, fence=attempt.fence, failure=why, rewards=rewards)
            await store.finish([done])
        found = await examples.find(store, config, steps)
    ids = {title.partition(",")[0]: one.id[-1] for title, one in found.items()}
    assert ids == {"A success": "2", "A failure": "1"}
