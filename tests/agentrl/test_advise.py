"""What `agentrl algorithms --for` says of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from agentrl.algorithms.data.batch import Batch
from agentrl.cli import advise
from agentrl.config import RunConfig
from agentrl.errors import StoreError
from agentrl.store import open_store
from agentrl.types import NewRollout, Outcome, Reward, Scope, Transition, float32, int32
from tests.algorithms.worlds import Call, Play, world


def paid(*process: float) -> list[Call]:
    return [Call("start" if not n else "end", rewards={"p": x}) for n, x in enumerate(process)]


def advised(batch: Batch, calls: float, repeated: float) -> list[tuple[str, str]]:
    states = advise.look_at(batch)._replace(calls=calls, repeated=repeated)
    return advise.advice(RunConfig(), batch, states)


def test_a_misleading_process_reward_is_warned_of() -> None:
    right = world(Play(paid(1, 1), 1.0), Play(paid(1, 0), 0.0), Play(paid(0, 0), 0.0))
    wrong = world(Play(paid(0, 0), 1.0), Play(paid(1, 0), 0.0), Play(paid(1, 1), 0.0))
    noise = world(*(Play(paid(x, x), y) for x in (0.0, 1.0) for y in (0.0, 1.0)))
    for batch, preset, said in (
        (right, "streams", "+0.87"),
        (wrong, "warning", "would mislead"),
        (noise, "streams", "with gate = 'agree'"),
    ):
        suggestions = advised(batch, 2.0, 1.0)
        first, why = suggestions[0]
        assert first == preset
        assert said in why
        assert advise.choice(suggestions) == ("peers" if preset == "warning" else "streams")


def test_states_that_come_back_and_roles_are_seen() -> None:
    right = [Call("a"), Call("b"), Call("c", role="critic", node=1)]
    batch = world(
        Play(right, 1.0),
        Play(right, 1.0),
        Play([Call("a"), Call("b"), Call("d", role="critic")], 0.0),
        Play([Call("e"), Call("e"), Call("e", role="critic")], 0.0, group=1),
    )
    assert advise.repeats(batch) == pytest.approx(5 / 8)
    names = [preset for preset, _ in advised(batch, 3.0, 1 / 3)]
    assert names == ["peers", "grpo", "dr-mas", "batch-td"]
    seldom = [preset for preset, _ in advised(batch, 3.0, 0.1)]
    assert seldom == ["peers", "grpo", "dr-mas"]
    batch.rewards["role:own"] = batch.rewards["outcome"]
    assert advise.choice(advised(batch, 3.0, 1 / 3)) == "grpo+per-role"


def test_states_that_explain_nothing_are_not_valued() -> None:
    """The same last state and action ended well and badly."""
    calls = [[Call("a", node=1), Call("b", node=2)] for _ in range(4)]
    unclear = world(*(Play(one, float(n % 2)) for n, one in enumerate(calls)))
    clear = world(*(Play(one, 1.0) for one in calls[:3]), Play([*calls[3][:1], Call("c")], 0.0))
    assert advise.explained(unclear) == 0.0
    assert advise.explained(clear) == 1.0
    never_twice = world(*(Play([Call("a"), Call("b")], float(n % 2)) for n in range(4)))
    assert advise.explained(never_twice) == 0.0
    for batch, preset in ((unclear, []), (clear, ["batch-td"])):
        found = advised(batch, 2.0, 1.0)
        assert found[0] == advise.COMPARED
        assert [name for name, _ in found] == ["peers", "grpo", *preset]


def test_states_to_which_a_rollout_comes_back_are_valued() -> None:
    ends = (0, 0, 1, 1)
    back = world(*(Play([Call("a", node=n), Call("a", node=1)], float(n)) for n in ends))
    assert advise.returns(back) == 0.5
    assert advised(back, 2.0, 1.0)[0] == advise.COMPARED  # 1 led to 0 and 1
    back = world(*(Play([Call("a", node=2), Call("a", node=n)], float(n)) for n in ends))
    assert advised(back, 2.0, 1.0)[0] == advise.VALUED


async def test_a_run_is_advised_from_its_store(tmp_path: Path) -> None:
    config = replace(RunConfig(name="r"), store=f"sqlite:///{tmp_path / 'store.db'}")
    async with open_store(config.store) as store:
        await store.open_run("r", msgspec.to_builtins(config))
        await store.enqueue(
            [NewRollout(id=f"r/g/{i}", run="r", group="r/g", index=i, task={}) for i in range(2)]
        )
        for i, attempt in enumerate(await store.claim(2, runner="w", run="r", lease=60)):
            call = Transition(
                id=f"c{i}", attempt=attempt.id, index=0, prompt=int32([1]), completion=int32([2]),
                logprobs=float32([-1.0]),
            )  # fmt: skip
            await store.add_transitions([call])
            about = {"name": "p", "scope": Scope.TRANSITION, "target": call.id}
            rows = [Reward(value=float(i)), Reward(value=1.0 - i, **about)]
            await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence, rewards=rows)])
    lines = await advise.advise(config)
    assert lines[0] == "policy: 2 rollouts, 1.0 calls each"
    assert lines[1] == "  choice: grpo"
    assert "correlation with the outcome is -1.00, would mislead" in lines[2]
    assert lines[3] == "  grpo      copies the outcome to all calls; needs nothing"
    assert lines[4] == "what each needs on our tasks: algorithms/CREDIT.md#which-credit-when"


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (advise.States(calls=1.0, repeated=0.9, back=0.9, explained=0.9), []),
        (advise.States(calls=3.0, repeated=0.1, back=0.0, explained=0.1), []),
        (
            advise.States(calls=3.0, repeated=0.54, back=0.2, explained=1.0),
            [
                "54% of the later states were seen by other rollouts of their task",
                "20% of the calls are in a state that their rollout was in before",
                "the last state explains 100% of the differences in outcome",
            ],
        ),
    ],
)
def test_states_are_described_where_they_tell_something(
    states: advise.States, said: list[str]
) -> None:
    assert list(advise.about(states)) == said


async def test_a_run_without_a_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no store"):
        await advise.advise(replace(RunConfig(), store=f"sqlite:///{tmp_path / 'store.db'}"))
