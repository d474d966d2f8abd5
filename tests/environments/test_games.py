"""Games and tools of other packages, each in the interpreter that has it, with a real gateway."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.environments.pages import ROOT, figures, played, python, trained

pytestmark = pytest.mark.timeout(600)  # on a busy machine; ground truth is searched for
FOUND = {  # tasks, and the score of ground truth, which is the most there is
    "bfcl": (200, 1.0),
    "gymnasium": (128, 1.0),
    "minigrid": (128, 0.955),  # a goal costs the share of its steps
    "pettingzoo": (128, 1.0),
    "textarena": (128, 1.0),
    "textworld": (5, 1.0),
}


@pytest.mark.parametrize("name", FOUND)
def test_ground_truth_has_full_marks(name: str) -> None:
    found = figures(name)
    assert found["ok"], found["lines"]
    assert (found["tasks"], found["score"], found["ground_truth"]) == (*FOUND[name], 1.0)


def test_rewards_of_steps_are_stored_and_summed() -> None:
    said = ["I turn left? No: down.", "nonsense", "down", "right", "down", "right", "right"]
    found = played("gymnasium", "FrozenLake-v1", {"agent": said}, is_slippery=False)
    assert found["steps"] == [0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert found["outcome"] == 0.0
    assert "S start" not in found["calls"][0]["last"]
    assert found["calls"][0]["last"].startswith("(S)FFF\n")
    assert found["calls"][2]["last"].startswith("You named no action.\nSFFF\n(F)HFH")


def test_an_episode_that_is_cut_short_has_its_rewards() -> None:
    found = played("gymnasium", "CartPole-v1", {"agent": ["0", "1"]}, limit=6)
    assert found["steps"] == [1.0] * 6
    assert (found["outcome"], found["problem"]) == (6.0, "")


def test_numbers_are_actions_of_a_box() -> None:
    found = played("gymnasium", "Pendulum-v1", {"agent": ["torque 1.5", "9"]}, limit=2, illegal=-50)
    assert found["steps"][0] > -20
    assert found["steps"][1] == -50


def test_what_is_held_is_seen() -> None:
    way = ["right", "pickup", "forward"]
    found = played("minigrid", "MiniGrid-DoorKey-5x5-v0", {"agent": way}, limit=4)
    assert "You hold" not in found["calls"][1]["last"]
    assert "You hold a yellow key." in found["calls"][2]["last"]


def test_images_are_refused() -> None:
    found = played("gymnasium", "MiniGrid-Empty-5x5-v0", {"agent": ["0"]})
    assert "gymnasium:MiniGrid-Empty-5x5-v0" in found["problem"]


def test_agents_of_a_game_are_roles_with_rewards() -> None:
    moves = {"player_1": ["0", "3", "6"], "player_2": ["1", "2"]}
    found = played("pettingzoo", "classic.tictactoe_v3", moves)
    assert [call["role"] for call in found["calls"]] == ["player_1", "player_2"] * 2 + ["player_1"]
    assert found["asks"] == ["player_1", "player_2"]
    assert (found["outcome"], found["steps"]) == (0.0, [0.0, 0.0, 0.0, 0.0, 1.0])
    assert found["by_role"] == {"player_1": 1.0, "player_2": -1.0}
    assert found["calls"][4]["last"].splitlines()[:3] == ["x o o", "x 4 5", "6 7 8"]


def test_random_opponents_move_without_a_call() -> None:
    found = played("pettingzoo", "classic.tictactoe_v3", {"agent": ["nothing"]}, opponents="random")
    assert [call["role"] for call in found["calls"]] == ["agent"]
    assert (found["outcome"], found["asks"]) == (-1.0, [])


def test_players_of_textarena_are_roles() -> None:
    moves = {"player_0": ["[0]", "[1]", "[2]"], "player_1": ["[3]", "[4]"]}
    found = played("textarena", "TicTacToe-v0", moves, players=2)
    assert [call["role"] for call in found["calls"]] == ["player_0", "player_1"] * 2 + ["player_0"]
    assert (found["outcome"], found["by_role"]) == (0.0, {"player_0": 1.0, "player_1": -1.0})


MORE = {
    "Wordle-v0": "nltk.downloader",
    "TwentyQuestions-v0": "OpenRouter",
    "UltimateTexasHoldem-v0": "Python 3.12",
}


@pytest.mark.parametrize("game", MORE)
def test_games_that_need_more_say_what(game: str) -> None:
    found = played("textarena", game, {"agent": ["[1]"]})
    if found["problem"]:  # words may be there, and Python may be newer
        assert game in found["problem"]
        assert MORE[game] in found["problem"]


def test_what_a_model_says_does_not_crash_the_interpreter(tmp_path: Path) -> None:
    made = "import sys, pathlib, tests.environments.textworld.figures as made;"
    made += "made.make_games(pathlib.Path(sys.argv[1]))"
    subprocess.run([python("textworld"), "-c", made, tmp_path], cwd=ROOT, check=True)
    said = ["8\ufffdinser", "tak\xe9 \U0001f600", "take " * 2000, "\x07\x00", "take coin"]
    found = played("textworld", str(tmp_path / "games"), {"agent": said})
    assert (found["problem"], found["outcome"]) == ("", 1.0)


def test_functions_are_told_when_the_data_set_says() -> None:
    done = {"agent": ["Done."]}
    found = played("bfcl", "multi_turn_miss_func", done)
    tools = [call["tools"] for call in found["calls"]]
    assert tools[3] == tools[2] + 1
    assert found["calls"][3]["last"].startswith("I have updated some more functions")
    assert found["outcome"] == 0.0


def test_only_literals_of_known_functions_are_evaluated() -> None:
    bad = [
        ("cd", '{"folder": "document"}'),
        ("__import__", '{"name": "os"}'),
        ("cd", '{"a=1)+(b": 1}'),
    ]
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}}
             for i, (n, a) in enumerate(bad)]  # fmt: skip
    found = played("bfcl", "multi_turn_base", {"agent": [{"tool_calls": calls}, "Done."]})
    assert found["problem"] == ""
    assert found["calls"][1]["last"] == "None"


@pytest.mark.parametrize(
    ("arguments", "score"),
    [
        ({"base": 10, "height": 5}, 1.0),
        ({"base": 10, "height": 5, "unit": "units"}, 1.0),
        ({"base": 10, "height": 6}, 0.0),
        ({"base": [10], "height": {"of": 5}}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_single_request_is_one_call(arguments: dict[str, Any], score: float) -> None:
    function = {"name": "calculate_triangle_area", "arguments": json.dumps(arguments)}
    call = {"id": "c", "type": "function", "function": function}
    found = played("bfcl", "simple_python+live_simple", {"agent": [{"tool_calls": [call]}]})
    assert (found["problem"], found["outcome"], len(found["calls"])) == ("", score, 1)
    assert found["calls"][0]["tools"] == 1


async def test_frozen_lake_is_learned(tmp_path: Path) -> None:
    policy = """
import random
from agentrl.tiny import imitator

def build(directory, seed):
    dice, talks = random.Random(seed), []
    for _ in range(1000):
        rows = [list(line) for line in "SFFF FHFH FFFH HFFG".split()]
        row, column = dice.randrange(4), dice.randrange(4)
        rows[row][column] = f"({rows[row][column]})"
        seen = "\\n".join("".join(line) for line in rows) + "\\nActions: left, down, right, up"
        move = {"role": "assistant", "content": dice.choice(["left", "down", "right", "up"])}
        talks.append([{"role": "user", "content": seen}, move])
    imitator(directory, talks, seed=seed, steps=80)
"""
    settings = ["environment_options.rules=false", "environment_options.limit=16",
                "sampling.max_tokens=6", "algorithm.lr=1e-2", "algorithm.max_kl=1.0",
                "runner.concurrency=64", "runner.processes=2", "eval.tasks=8",
                "eval.every=12", f"output={tmp_path / 'runs'}"]  # fmt: skip
    steps = await trained("gymnasium", tmp_path, policy, *settings)
    scores = [row.metrics["eval/score"] for row in steps if "eval/score" in row.metrics]
    sampled = [row.metrics["eval/sampled"] for row in steps if "eval/sampled" in row.metrics]
    assert scores[0] <= 0
    assert max(scores[-1], sampled[-1]) > 0.5


@pytest.mark.parametrize("name", ["minigrid", "pettingzoo", "textarena"])
async def test_a_page_trains(name: str, tmp_path: Path) -> None:
    policy = """
from pathlib import Path
from typing import Any
from agentrl.tiny import imitator

def build(directory, seed):
    talk = [{"role": "user", "content": "Act: 0"}, {"role": "assistant", "content": "forward"}]
    imitator(directory, [talk], seed=seed, steps=2)
    file = Path(directory) / "config.json"
    file.write_text(file.read_text().replace(": 512", ": 8192"))  # rules are long
"""
    settings = ["steps=1", "algorithm.groups=1", "algorithm.group_size=2", "sampling.max_tokens=4",
                "environment_options.limit=3", f"output={tmp_path / 'runs'}"]  # fmt: skip
    steps = await trained(name, tmp_path, policy, *settings)
    (row,) = [row for row in steps if "rollouts" in row.metrics]
    assert (row.metrics["rollouts"], row.metrics["rollouts/failed"]) == (2, 0)


def test_who_moves_first_in_a_simultaneous_game_is_paid_for_it() -> None:
    moves = {"player_0": ["1"], "player_1": ["0"]}  # paper beats rock, twice
    found = played("pettingzoo", "classic.rps_v2", moves, max_cycles=2)
    assert found["problem"] == ""
    assert found["by_role"] == {"player_0": 2.0, "player_1": -2.0}
    assert sorted(step for step in found["steps"] if step) == [-1.0, -1.0, 1.0, 1.0]
