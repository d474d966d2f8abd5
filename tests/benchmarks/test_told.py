"""Worlds of the benchmark of +told and +echo: success is rare, a hint is read, and steps learn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.observations import AnswerTexts
from agentrl.algorithms.objective.core import Echo
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.presets.told import Telling
from tests.benchmarks import told
from tests.benchmarks.told_worlds import (
    ECHO_WORLDS,
    TOLD,
    TOLD_WORLDS,
    Player,
    TabularModel,
    World,
    make_tokenizer,
)

EVERY = (*TOLD_WORLDS, *ECHO_WORLDS)


def player(world: World, seed: int = 7) -> Player:
    model = TabularModel(make_tokenizer(), world.rare)
    return Player(world, model, world.rule(seed), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("world", EVERY, ids=lambda world: world.name)
def test_an_untrained_policy_hardly_ever_succeeds(world: World) -> None:
    """Exactly: each step is right with the probability of its word."""
    made, draw = player(world), random.Random(1)
    logprobs = made.model.logits([(0, made.model.id["<assistant>"], -1)])[0].log_softmax(-1)
    rates = []
    for _ in range(100):
        path = world.task(made.rule, draw)["path"]
        words = [made.model.id[made.rule[state]] for state in path]
        rates.append(float(logprobs[words].sum().detach().exp()))
    assert sum(rates) / len(rates) <= 0.03


@pytest.mark.parametrize("source", ["task:solution", "sibling", "error", "next"])
def test_a_told_policy_is_likelier_to_be_right(source: str) -> None:
    world = next(each for each in TOLD_WORLDS if each.source == source)
    made, draw = player(world), random.Random(2)
    (group,) = made.groups([world.task(made.rule, draw)], 1500, 0)
    by_reward = {row.reward(): row for row in group.rollouts}
    rows = [by_reward[0.0], by_reward[1.0]]  # a failure, and a success for its sibling to be told
    policy = TrainedPolicy(made.model.logprobs, made.model.tokenizer)
    told_calls = Telling(source, template=TOLD).calls([replace(group, rollouts=rows)], policy)
    features = [made.model.read([*call.prompt, 0])[-1] for call in told_calls.values()]
    hints = [(state, hint) for state, _, hint in features if hint >= 0]
    assert hints
    for state, hint in hints:
        assert made.model.words[hint] == made.rule[made.model.words[state]]


@pytest.mark.parametrize("world", [TOLD_WORLDS[0], ECHO_WORLDS[1]], ids=lambda world: world.name)
def test_the_score_is_the_expected_share_of_successes(world: World) -> None:
    made, draw = player(world), random.Random(4)
    with torch.no_grad():
        for state in list(made.rule)[::2]:  # a policy that has learned every other state
            made.model.tables[0][made.model.id[state], made.model.id[made.rule[state]]] = 3.0
    tasks = [world.task(made.rule, draw) | {"broken": False} for _ in range(20)]
    played = [row.reward() for group in made.groups(tasks, 100, 0) for row in group.rollouts]
    assert made.score(tasks) == pytest.approx(sum(played) / len(played), abs=0.04)


def test_what_answers_state_are_observations() -> None:
    world = ECHO_WORLDS[0]
    made = player(world)
    (group,) = made.groups([world.task(made.rule, random.Random(0))], 2, 0)
    batch = build_batch([group], observations=AnswerTexts(Echo(), made.model.tokenizer))
    text = made.model.tokenizer.decode(batch.rows[0].tokens[batch.rows[0].observed])
    (first, second, _) = group.rollouts[0].task["path"]
    assert text.startswith(f"{first} opens {made.rule[first]}\nyou see {second}")


def piece(world: World, name: str, seed: int = 7, steps: int = 5) -> told.Piece:
    return told.Piece(world.name, name, *told.presets(world)[name], seed, steps, 0.1)


@pytest.mark.parametrize("world", [TOLD_WORLDS[0], ECHO_WORLDS[0]], ids=lambda world: world.name)
def test_every_preset_of_a_world_runs(world: World) -> None:
    for name in told.presets(world):
        found = told.run(piece(world, name))
        assert [n for n, _ in found.curve] == [64 * n for n in range(6)]
        assert 0 <= found.curve[0][1] <= 0.1


def test_a_result_in_the_file_is_not_run_again(tmp_path: Path) -> None:
    one = piece(TOLD_WORLDS[0], "told, wrong", steps=1)
    first = told.Results(tmp_path / "results.jsonl").of(one)
    again = told.Results(tmp_path / "results.jsonl")
    assert again.of(one) == first  # with the CPU seconds of the first run
    again.of(piece(TOLD_WORLDS[0], "grpo", steps=1))
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 2


def test_the_summary_is_of_paired_seeds() -> None:
    def result(*scores: float) -> told.Result:
        curve = [(64 * n, score) for n, score in enumerate(scores)]
        return told.Result(piece(TOLD_WORLDS[0], "grpo"), curve, {}, 1.0)

    runs = {
        "grpo": [result(0, 0, 0.9, 0.9, 0.9), result(0, 0, 0, 0.5, 0.6)],
        "told": [result(0, 0.9, 0.9, 0.9, 0.9), result(0, 0, 0.8, 0.8, 0.8)],
    }
    found = told.summary(runs)
    assert found["told"]["rollouts to 80 %"] == [64, 128]
    assert found["grpo"]["rollouts to 80 %"] == [128, None]
    assert found["told"]["ratio"] == pytest.approx((0.5 + 0.5) / 2)
    assert found["told"]["end"] == pytest.approx((0.9 + 0.8) / 2)
    assert found["told"]["end less grpo's"] == pytest.approx((0 + 0.8 - 1.1 / 3) / 2)
