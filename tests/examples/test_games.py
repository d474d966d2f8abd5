"""The games' examples in short form: their models are built, play in the right form, and train."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.algorithms.model import load_model
from agentrl.algorithms.tiny import word_tokenizer
from agentrl.config import load
from agentrl.loading import load_attribute
from agentrl.runners.games import Game
from agentrl.store import open_store
from agentrl.types import RolloutState, Scope

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


def test_tictactoe_names_its_marks_as_moves() -> None:
    folder = EXAMPLES / "tictactoe"
    try:
        describe = load_attribute("game.py:describe", folder, key="test")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["game"]
    game = Game("tic_tac_toe")
    state = game.start()
    for action in (4, 0):
        state.apply_action(action)
    assert describe(game.view(state, 0)) == [
        {"role": "user", "content": "x to move: o(0,0) x(1,1)"}
    ]


async def test_a_built_policy_plays_and_trains(
    name: str, example: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five steps of imitation most answers are no move: the games end all the same."""
    monkeypatch.setattr(example["policy"], "STEPS", 5)
    monkeypatch.setattr(example["policy"], "DEMONSTRATIONS", 100)
    example["policy"].build(tmp_path / "policy", 0)
    load_model(tmp_path / "policy", device="cpu")
    small = ["steps=1", "algorithm.groups=2", "algorithm.group_size=2", "eval.tasks=2"]
    small += ["eval.sampled=false", f"output={tmp_path}", f"policy.model={tmp_path / 'policy'}"]
    command = [sys.executable, "-m", "agentrl", "train", str(EXAMPLES / name / "run.toml")]
    trained = await asyncio.to_thread(
        subprocess.run, [*command, *small], capture_output=True, text=True, timeout=100, check=False
    )
    assert trained.returncode == 0, trained.stderr
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rollouts = await store.rollouts(name, step=0)
        assert len(rollouts) >= 4
        for rollout in rollouts:
            assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
            assert rollout.result["ended"] in ("rules", "forfeit")
            rows = [row for row in rollout.rewards if row.scope is Scope.ROLE]
            assert bool(rows) == (name == "negotiation")
