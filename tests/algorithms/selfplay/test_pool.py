"""A pool of opponents: who plays whom, how it is counted, what is kept."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace as replaced
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.presets import registry
from agentrl.algorithms.ratings import elo
from agentrl.algorithms.selfplay import (
    MEMORY,
    OpponentPool,
    SeatRecord,
    Snapshot,
    check_seat_comparison,
    most_redundant,
)
from agentrl.core.config import resolve
from agentrl.core.config.derived import self_playing_policy, snapshots_served
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.types import Branch, Group, Reward, Rollout, RolloutState, Scope
from tests import factories
from tests.algorithms.train.test_update import group

SEATS = ["player_0", "player_1"]
OUTCOMES = ("role:outcome",)


def pool(opponents: Any = "uniform", **settings: Any) -> OpponentPool:
    every = {} if opponents == "self" else {"every": 2}
    made = {"seats": SEATS, "opponents": opponents} | every | settings
    run = {"selfplay": made, "algorithm": {"group_size": 24}}
    return OpponentPool(resolve(run, source="test").selfplay, "policy", seed=0)


def grown(steps: int, *args: Any, ahead: int = 0, **settings: Any) -> OpponentPool:
    """After so many steps without games."""
    made = pool(*args, **settings)
    made.ahead = ahead
    for step in range(steps + 1):
        made.finish(step)
    return made


def names(made: OpponentPool) -> list[str]:
    return [snapshot.name for snapshot in made.drawn]


def game(returns: list[float], *seats: str, roles: list[str] = SEATS) -> Rollout:
    """A rollout in which `seats` played and got `returns`."""
    rollout = group("g", 0.0).rollouts[0]
    rewards = [
        Reward(value=value, scope=Scope.ROLE, target=role)
        for role, value in zip(roles, returns, strict=True)
    ]
    seated = dict(zip(roles, seats, strict=True))
    first = rollout.transitions[0]
    calls = [replace(first, id=role, role=role, policy=seated[role]) for role in roles]
    return replace(rollout, rewards=rewards, transitions=calls, seats=seated)


def groups(*rollouts: Rollout) -> list[Group]:
    return [factories.group(*rollouts)]


def test_alone_it_plays_every_seat() -> None:
    alone = pool("self", every=10)
    assert alone.finish(0) is None
    assert alone.seats("g", 0) == alone.seats("g", 1) == dict.fromkeys(SEATS, "policy")


def test_a_snapshot_is_taken_at_the_start_and_every_n_steps() -> None:
    assert names(grown(5, self_share=0.0)) == ["policy@000000", "policy@000002", "policy@000004"]
    late = pool()
    taken = late.finish(7)  # a run that plays only from here on
    assert taken is not None
    assert taken.name == "policy@000007"


def test_a_group_has_one_opponent_and_the_seats_are_swapped() -> None:
    made = grown(9, self_share=0.0)
    for number in range(20):
        seats = [made.seats(f"g{number}", index) for index in range(8)]
        learners = [role for seat in seats for role, name in seat.items() if name == "policy"]
        assert Counter(learners) == {"player_0": 4, "player_1": 4}
        assert len({name for seat in seats for name in seat.values()} - {"policy"}) == 1


def test_the_opponent_takes_all_other_seats() -> None:
    roles = ["north", "east", "south"]
    made = grown(0, self_share=0.0, seats=roles)
    assert made.seats("g", 1) == {
        "north": "policy@000000", "east": "policy", "south": "policy@000000",
    }  # fmt: skip
    won = game([1, 3, 1], "policy@000000", "policy", "policy@000000", roles=roles)
    drawn = game([2, 3, 4], "policy@000000", "policy", "policy@000000", roles=roles)
    found = [made.game(rollout) for rollout in (won, drawn)]
    assert [row and row.scores for row in found] == [{"east": 1.0}, {"east": 0.5}]


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("latest", (0, 0, 1)), ("uniform", (1 / 3, 1 / 3, 1 / 3)), ("pfsp", (0.009, 0.234, 0.757))],
)
def test_opponents_are_drawn_by_kind(kind: str, shares: tuple[float, ...]) -> None:
    made = grown(4, kind, self_share=0.0)
    for snapshot, (games, score) in zip(made.drawn, [(8, 8), (0, 0), (8, 0)], strict=True):
        snapshot.records = {role: SeatRecord(games, score) for role in SEATS}
    assert [snapshot.rate() for snapshot in made.drawn] == [0.9, 0.5, 0.1]
    drawn = Counter(made.opponent(f"g{number}") for number in range(3000))
    found = [drawn[name] / 3000 for name in names(made)]
    assert found == pytest.approx(shares, abs=0.03)


def test_a_share_of_groups_is_self_play() -> None:
    made = grown(4, self_share=0.25)
    drawn = Counter(made.opponent(f"g{number}") for number in range(2000))
    assert drawn["policy"] / 2000 == pytest.approx(0.25, abs=0.03)


def test_who_plays_is_a_function_of_seed_and_checkpoint() -> None:
    one = grown(6, "pfsp")
    one.record_games(groups(*[game([1, -1], "policy", "policy@000002")] * 3))
    other = pool("pfsp")
    other.restore(json.loads(json.dumps(one.dump())))
    asked = [(f"g{number}", index) for number in range(50) for index in range(4)]
    assert [one.seats(*at) for at in asked] == [other.seats(*at) for at in asked]
    assert one.now == other.now
    other.seed = 1
    assert [one.seats(*at) for at in asked] != [other.seats(*at) for at in asked]


def test_a_win_moves_both_ratings_and_the_record_of_the_seat() -> None:
    made = grown(0)
    found = made.record_games(groups(game([1, -1], "policy", "policy@000000")))
    assert made.drawn[0].rating == found["selfplay/elo/policy@000000"] == 992.0
    assert found["selfplay/elo"] == 1008.0
    assert found["selfplay/win_rate"] == found["selfplay/seat/player_0"] == 1.0
    made.record_games(groups(game([1, -1], "policy@000000", "policy")))
    assert made.now.rating == elo(1008, 992, 0.0, 16)
    (snapshot,) = made.drawn
    assert snapshot.records == {"player_0": SeatRecord(1, 1), "player_1": SeatRecord(1, 0)}
    assert snapshot.rate() == pytest.approx(0.5)
    made.record_games(groups(game([1, -1], "policy", "policy@000000")))
    assert snapshot.records["player_0"].games == 1 + MEMORY


def test_draws_alone_change_no_rating() -> None:
    made = grown(4, "pfsp", self_share=0.0)
    for name in names(made):
        found = made.record_games(groups(*[game([0, 0], "policy", name)] * 50))
    assert found["selfplay/draws"] == 1.0
    assert {made.now.rating, *(snapshot.rating for snapshot in made.drawn)} == {1000.0}
    drawn = Counter(made.opponent(f"g{number}") for number in range(3000))
    assert {round(count / 3000, 1) for count in drawn.values()} == {0.3}


def test_games_against_itself_are_no_results_of_the_pool() -> None:
    made = grown(0)
    found = made.record_games(groups(game([1, -1], "policy", "policy")))
    assert made.now.rating == 1000.0
    assert "selfplay/win_rate" not in found
    assert (found["selfplay/seat/player_0"], found["selfplay/seat/player_1"]) == (1.0, 0.0)


def test_seats_are_measured_on_games_against_others() -> None:
    games = [game([-1, 1], "policy", "policy@000000"), game([1, -1], "policy", "policy")]
    found = grown(0).record_games(groups(*games))
    assert found["selfplay/games"] == 2.0
    assert found["selfplay/seat/player_0"] == found["selfplay/win_rate"] == 0.0
    assert "selfplay/seat/player_1" not in found


def test_a_branch_is_no_game_of_its_own() -> None:
    made = grown(0)
    again = replace(game([1, -1], "policy", "policy@000000"), branch=Branch(rollout="g/0", calls=1))
    assert made.record_games(groups(again))["selfplay/games"] == 0.0
    assert made.now.rating == 1000.0


def test_an_opponents_return_is_nothing_to_compare_with() -> None:
    games = [game([1, -1], "policy", "policy@000000"), game([3, -3], "policy@000000", "policy")]
    batch = build_batch(groups(*games, game([2, -2], "policy", "policy")), reward_names=OUTCOMES)
    assert batch.roles == SEATS
    assert len(batch.transitions) == 4
    known = batch.rewards["role:outcome"].nan_to_num(nan=0.0).tolist()
    assert known == [1, 0, 0, -3, 2, -2]


def test_what_has_no_score_is_counted() -> None:
    made = grown(0)
    done = game([1, -1], "policy", "policy@000000")
    failed = replace(done, state=RolloutState.FAILED)
    half = replace(done, rewards=done.rewards[:1])
    found = made.record_games(groups(done, failed, half))
    assert (found["selfplay/games"], found["selfplay/unscored"]) == (1.0, 2.0)


def test_a_seat_that_the_game_does_not_have_ends_the_first_step() -> None:
    made = grown(0, seats=[*SEATS, "player_2"])
    lost = game([1, -1], "policy", "policy@000000")
    assert (
        made.record_games(groups(replace(lost, state=RolloutState.FAILED)))["selfplay/unscored"]
        == 1
    )
    said = (
        r"no model played 'player_2' in any of 1 games, whose roles are player_0, player_1; did you"
    )
    with pytest.raises(TrainingError, match=said):
        made.record_games(groups(lost))


def test_a_seat_is_known_by_its_return_or_from_an_earlier_step() -> None:
    """A player may lose before the other one is asked."""
    lost = game([-1, 1], "policy", "policy@000000")
    early = replace(lost, transitions=lost.transitions[:1])
    assert grown(0).record_games(groups(early))["selfplay/games"] == 1
    made = grown(0)
    made.record_games(groups(lost))
    assert made.record_games(groups(replace(early, rewards=[])))["selfplay/unscored"] == 1


def test_a_full_pool_keeps_first_newest_and_a_spread_between() -> None:
    assert names(grown(16, pool=4)) == [f"policy@{step:06d}" for step in (0, 8, 14, 16)]
    assert names(grown(16, pool=2)) == ["policy@000000", "policy@000016"]
    assert names(grown(16, pool=1)) == ["policy@000016"]
    kept = [Snapshot(str(step), step, 0.0) for step in (0, 4, 5, 20)]
    assert most_redundant(kept).step == 4


def test_an_opponent_is_held_until_the_step_of_its_rollouts() -> None:
    made = grown(4, pool=1, ahead=3, self_share=0.0)
    assert names(made) == ["policy@000004"]
    assert [s.name for s in made.now.snapshots] == [f"policy@{step:06d}" for step in (0, 2, 4)]
    made.finish(5)
    assert [s.step for s in made.now.snapshots] == [2, 4]
    made.record_games(groups(game([-1, 1], "policy", "policy@000002")))
    assert made.now.rating < 1000
    made.finish(9, playing=["policy", "policy@000002"])
    assert [s.step for s in made.now.snapshots] == [2, 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seats": ["player_0"]}, "two or more roles"),
        ({"seats": ["a", "a"]}, "each named once"),
        ({"opponents": "pfsp"}, r"selfplay\.seats is missing"),
        ({"seats": SEATS, "pool": 0}, "selfplay.pool"),
        ({"seats": SEATS, "opponents": "pfsp", "pool": 0}, "selfplay.pool"),
        (
            {"seats": SEATS, "every": 8},
            r"selfplay\.every is for selfplay\.opponents = .latest. or .uniform. or .pfsp., and",
        ),
        ({"seats": SEATS, "opponents": "pfsp", "self_share": 1.0}, "selfplay.self_share"),
        ({"seats": SEATS, "opponents": "best"}, "did you mean 'latest'"),
        ({"seats": ["judge", "a"]}, "'gpt' plays them and does not learn; policy do"),
        (
            {"seats": [*SEATS, "c"], "opponents": "pfsp"},
            "group_size = 8 is not a multiple of the 3",
        ),
        ({"seats": ["player_0", "judge"]}, "'gpt' plays them"),
    ],
)
def test_settings_that_make_no_game(settings: dict[str, Any], message: str) -> None:
    run = {"upstreams": {"gpt": {"base_url": "http://x/v1"}}, "roles": {"judge": "gpt"}}
    with pytest.raises(ConfigError, match=message):
        resolve({**run, "selfplay": settings}, source="run.toml")


@pytest.mark.parametrize(("staleness", "served"), [(0, 8), (1, 9), (11, 10)])
def test_vllm_has_room_for_the_pool(staleness: int, served: int) -> None:
    games = {"seats": SEATS, "opponents": "pfsp"}
    run: dict[str, Any] = {"selfplay": games, "engine": {"kind": "vllm"}}
    run["algorithm"] = {"max_staleness": staleness}
    with pytest.raises(ConfigError, match=r"policy\.lora\.rank, or engine\.kind = 'embedded'"):
        resolve(run, source="run.toml")
    run["policy"] = {"lora": {"rank": 2}}
    assert snapshots_served(resolve(run, source="run.toml")) == served
    assert snapshots_served(resolve(run | {"selfplay": {}}, source="run.toml")) == 0


def test_alone_a_policy_plays_all_seats_of_every_game() -> None:
    resolve({"selfplay": {"seats": [*SEATS, "c"]}}, source="run.toml")  # 8 games are no multiple


def test_several_policies_say_who_plays() -> None:
    adapter = {"rank": 4}
    policies = {
        name: {"roles": [role], "lora": adapter}
        for name, role in zip("ab", ("waiter", "cook"), strict=True)
    }
    run: dict[str, Any] = {"policy": {"model": "m"}, "policies": policies}
    run["selfplay"] = {"seats": SEATS}
    with pytest.raises(ConfigError, match=r"selfplay\.seats: a, b learn; name one of the seats"):
        resolve(run, source="run.toml")
    policies["b"]["roles"] = ["player_1"]
    assert self_playing_policy(resolve(run, source="run.toml")) == "b"
    policies["a"]["roles"] = ["player_0"]
    with pytest.raises(ConfigError, match="names 'player_1', which 'b' plays"):
        resolve(run, source="run.toml")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("spiral", {}),
        ("grpo+per-role", {"reward": "role:outcome"}),
        ("dr-grpo+per-role", {"reward": "role:outcome"}),
        ("dr-mas", {"reward": "role:outcome"}),
        ("reinforce", {"reward": "role:outcome"}),
    ],
)
def test_fair_comparisons(name: str, options: dict[str, Any]) -> None:
    check_seat_comparison(registry.make(name, options))


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo", "reinforce+ema", "liteppo", "dapo"])
def test_seats_are_not_compared_with_each_other(name: str) -> None:
    with pytest.raises(ConfigError, match="compares the seats"):
        check_seat_comparison(registry.make(name, {}))


@pytest.mark.parametrize("name", ["auto+per-role", "peers", "batch-td", "gigpo", "reinforce++"])
def test_what_all_seats_earn_is_not_added_up(name: str) -> None:
    """The last mover alone would be credited with its return."""
    with pytest.raises(ConfigError, match="adds up what they earn; choose spiral, or grpo"):
        check_seat_comparison(registry.make(name, {"reward": "role:outcome"}))


def test_seats_are_not_scaled_by_each_other() -> None:
    algo = registry.make("liteppo+per-role", {"reward": "role:outcome"})
    check_seat_comparison(algo)
    with pytest.raises(ConfigError, match="compares the seats"):
        check_seat_comparison(replaced(algo, credit=replaced(algo.credit, norm_by=("all",))))
