"""The games' examples in short form: their models are built, play in the right form, and train."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.algorithms.model.load import load_model
from agentrl.core.config import load
from agentrl.core.loading import load_attribute
from agentrl.core.types import RolloutState, Scope
from agentrl.runners.games import Game, View
from agentrl.store import open_store
from agentrl.tiny.models import word_tokenizer
from tests import warm

pytest.importorskip("pyspiel")

EXAMPLES = Path(__file__).parents[2] / "examples"
MODULES = ("game", "policy", "tasks", "verifier")
Modules = dict[str, ModuleType]


@pytest.fixture(params=["tictactoe", "negotiation"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def example(name: str) -> Iterator[Modules]:
    """The modules of an example, which have the same names in all of them."""
    folder = EXAMPLES / name
    for module in MODULES:
        load_attribute(f"{module}.py:__name__", folder, key="test")
    yield {module: sys.modules[module] for module in MODULES}
    for module in MODULES:
        del sys.modules[module]
    sys.path.remove(str(folder))


def test_the_run_file_is_valid_and_names_what_exists(name: str, example: Modules) -> None:
    config = load(EXAMPLES / name / "run.toml")
    for path in (config.agent.path, config.verifier.path, config.policy.build):
        assert load_attribute(path, EXAMPLES / name, key="test")
    tasks = example["tasks"]
    assert not {t["id"] for t in tasks.train} & {t["id"] for t in tasks.heldout}


def test_demonstrations_are_legal_and_every_word_is_a_token(name: str, example: Modules) -> None:
    policy, dice = example["policy"], random.Random(3)
    tokenizer = word_tokenizer(policy.WORDS)
    for _ in range(30):
        *asked, said = policy.demonstrate(dice)
        tokens = tokenizer(said["content"], add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(tokens) == said["content"]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        assert tokenizer.pad_token_id not in [*prompt, *tokens]


@pytest.mark.parametrize("name", ["tictactoe"])
def test_tictactoe_names_its_marks_as_moves(name: str, example: Modules) -> None:
    game = Game("tic_tac_toe")
    state = game.start()
    for action in (4, 0):
        state.apply_action(action)
    (asked,) = example["game"].describe(game.view(state, 0))
    board, _, legal = asked["content"].partition(" legal: ")
    assert board == "x to move: o(0,0) x(1,1)"
    assert legal == "x(0,1) x(0,2) x(1,0) x(1,2) x(2,0) x(2,1) x(2,2)"


@pytest.mark.parametrize("name", ["negotiation"])
def test_negotiation_says_what_an_offer_is_worth_to_who_hears_it(
    name: str, example: Modules
) -> None:
    seen = """Pool: Book: 3, Hat: 1, Basketball: 2
My values: Book: 1, Hat: 5, Basketball: 1
Agreement reached? 0
P0 offers: Offer: Book: 0, Hat: 0, Basketball: 2
P1 offers: Offer: Book: 1, Hat: 0, Basketball: 0"""
    (asked,) = example["game"].describe(View("bargaining", 0, seen, {"Agree": 0}))
    assert asked["content"].splitlines() == [
        "P0 after 2 offers",
        "Book: 3 worth 1",
        "Hat: 1 worth 5",
        "Basketball: 2 worth 1",
        "Left: Book: 2 Hat: 1 Basketball: 2 worth 9",
    ]


@pytest.mark.parametrize("name", ["negotiation"])
def test_negotiators_agree_to_all_and_never_to_nothing(name: str, example: Modules) -> None:
    pool = "Pool: Book: 1, Hat: 1, Basketball: 1\nMy values: Book: 4, Hat: 6, Basketball: 0\n"
    legal = {"Agree": 0, "Offer: Book: 1, Hat: 0, Basketball: 0": 1}
    dice, said = random.Random(0), {}
    for kept in (0, 1):
        seen = f"{pool}P1 offers: Offer: Book: {kept}, Hat: {kept}, Basketball: {kept}"
        view = View("bargaining", 0, seen, legal)
        said[kept] = {example["policy"].chosen(view, dice) for _ in range(30)}
    assert said == {0: {"Agree"}, 1: {"Offer: Book: 1, Hat: 0, Basketball: 0"}}


async def test_a_built_policy_plays_and_trains(
    name: str, example: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five steps of imitation most answers are no move: the games end all the same."""
    monkeypatch.setattr(example["policy"], "STEPS", 5)
    monkeypatch.setattr(example["policy"], "DEMONSTRATIONS", 100)
    example["policy"].build(tmp_path / "policy", 0)
    load_model(tmp_path / "policy", device="cpu")
    small = ["steps=1", "algorithm.groups=2", "algorithm.group_size=2", "eval.tasks=2"]
    small += ["audit.before=false", "eval.samples=0", f"output={tmp_path}"]
    small += [f"policy.model={tmp_path / 'policy'}"]
    command = ["-m", "agentrl", "train", str(EXAMPLES / name / "run.toml")]
    trained = await asyncio.to_thread(warm.run, *command, *small)
    assert trained.returncode == 0, trained.stderr
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rollouts = await store.rollouts(name, step=0)
        assert len(rollouts) >= 4
        for rollout in rollouts:
            assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
            assert rollout.result["ended"] in ("rules", "forfeit")
            rows = [row for row in rollout.rewards if row.scope is Scope.ROLE]
            assert bool(rows) == (name == "negotiation")
