"""What `agentrl algorithms --for` says of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from agentrl import advise
from agentrl.algorithms.data.batch import Batch
from agentrl.core.config import RunConfig
from agentrl.core.errors import StoreError
from agentrl.core.types import NewRollout, Outcome, Reward, Scope
from agentrl.store import open_store
from tests import factories
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
        assert advise.choice(suggestions) == ("auto" if preset == "warning" else "streams")


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
    assert names == ["auto", "grpo", "dr-mas"]
    assert [preset for preset, _ in advised(batch, 1.0, 1 / 3)] == ["grpo", "dr-mas"]
    batch.rewards["role:own"] = batch.rewards["outcome"]
    assert advise.choice(advised(batch, 3.0, 1 / 3)) == "grpo+per-role"


def told(way: Sequence[str]) -> list[Play]:
    """Sixteen rollouts whose first call decides; the observations after it, with {} for 0 or 1 or
    {u} for the number of the rollout, tell it, or do not."""
    plays = []
    for u in range(16):
        good = u % 2
        seen = ["start", *(one.format(good, u=u) for one in way)]
        calls = [Call(place, node=good if not i else 0) for i, place in enumerate(seen)]
        plays.append(Play(calls, float(good)))
    return plays


TELLING, SILENT, NEW = ["door {}", "room {}"], ["ok", "ok", "end {}"], ["page {u}", "page {u}, 2"]


def test_states_that_do_not_tell_how_rollouts_end_are_not_valued() -> None:
    for way, trust, names in (
        (TELLING, 1.0, ["auto", "grpo", "batch-td"]),
        (SILENT, 0.0, ["auto", "grpo"]),
        (NEW, 0.0, ["auto", "grpo"]),
    ):
        batch = world(*told(way))
        assert advise.look_at(batch).trust == trust
        found = advised(batch, 3.0, 1.0)
        assert found[0] == advise.COMPARED
        assert [name for name, _ in found] == names


def test_states_to_which_a_rollout_comes_back_are_valued() -> None:
    back = world(*told(["door {}", "door {}", "room {}"]))
    assert advise.returns(back) == 0.25
    assert advised(back, 4.0, 1.0)[0] == advise.VALUED
    assert advised(world(*told(["ok", "ok", "end {}"])), 4.0, 1.0)[0] == advise.COMPARED


def test_what_misleads_is_warned_of_with_the_presets_that_it_misleads() -> None:
    def warned(plays: Sequence[Play]) -> list[str]:
        batch = world(*plays)
        return list(advise.cautions(batch, advise.look_at(batch)))

    assert warned(told(TELLING)) == []
    (silent,) = warned(told(SILENT))
    assert 'do not tell how they end (answers such as "ok"): `batch-td`' in silent
    (new,) = warned(told(NEW))
    assert new.startswith("only 0% of the later states were seen by other rollouts: `gigpo`")
    penalties = [replace_outcome(play, play.outcome - 1) for play in told(TELLING)]
    (negative,) = warned(penalties)
    assert negative.startswith("outcomes are negative: `gigpo`, `hgpo`, `hcapo`")
    unequal = told(TELLING)
    for play in unequal[::2]:
        play.calls = [*play.calls[:-1], *[play.calls[-1]] * 4]
    (lengths,) = warned(unequal)
    assert lengths.startswith("rollouts of a task make 3 to 6 calls: `gigpo`")
    assert warned([Play([Call()], -1.0), Play([Call()], 0.0)]) == []  # one call: no credit to move
    assert warned([replace_outcome(play, 1.0) for play in told(SILENT)]) == []  # nothing to tell
    assert warned([replace_outcome(play, float("nan")) for play in told(SILENT)]) == []


def replace_outcome(play: Play, outcome: float) -> Play:
    return dataclasses.replace(play, outcome=outcome)


async def test_a_run_is_advised_from_its_store(tmp_path: Path) -> None:
    config = replace(RunConfig(name="r"), store=f"sqlite:///{tmp_path / 'store.db'}")
    async with open_store(config.store) as store:
        await store.open_run("r", msgspec.to_builtins(config))
        await store.enqueue(
            [NewRollout(id=f"r/g/{i}", run="r", group="r/g", index=i, task={}) for i in range(2)]
        )
        for i, attempt in enumerate(await store.claim(2, runner="w", run="r", lease=60)):
            call = factories.call(f"c{i}", attempt=attempt.id)
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
        (advise.States(calls=1.0, repeated=0.9, back=0.9, trust=0.9), []),
        (advise.States(calls=3.0, repeated=0.1, back=0.0, trust=0.1), []),
        (
            advise.States(calls=3.0, repeated=0.54, back=0.2, trust=0.8),
            [
                "54% of the later states were seen by other rollouts of their task",
                "20% of the calls are in a state that their rollout was in before",
                "`auto` and `peers` trust in the values of states by 80%",
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
