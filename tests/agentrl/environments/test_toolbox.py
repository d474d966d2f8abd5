"""What plug-ins share, without their packages."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.core.errors import ConfigError
from agentrl.environments import Episode
from agentrl.environments import toolbox as tools


@pytest.mark.parametrize(
    ("said", "action"),
    [("Left is a hole, so I go RIGHT.", "right"), ("pick up", "pick up"), ("upright", None),
     ("", None), (None, None), ([{"type": "text", "text": "left"}], "left"), ("-1", None)],
)  # fmt: skip
def test_the_last_action_that_is_named_counts(said: Any, action: str | None) -> None:
    assert tools.named({"content": said}, ["left", "right", "up", "pick up", "1"]) == action


def test_longer_numbers_are_no_shorter_ones() -> None:
    assert tools.named({"content": "12"}, ["1", "2", "12"]) == "12"
    assert tools.named({"content": "2.5"}, ["2", "5"]) is None
    assert tools.named({"content": "I take 2."}, ["2", "5"]) == "2"
    assert tools.named({"content": "13"}, ["1", "3"]) is None


def test_colors_of_a_picture_become_signs() -> None:
    taxi = "|\x1b[43m \x1b[0m\x1b[34;1mB\x1b[0m\x1b[35m\x1b[42mY\x1b[0m\x1b[0m|\n  (South)\n"
    assert tools.plain(taxi) == "|( )<B>[(Y)]|"


def test_observations_are_short_and_never_images() -> None:
    array = SimpleNamespace(tolist=lambda: [0.123456, 2, 1.23456e-05])
    assert tools.shown({"at": array}) == '{"at": [0.123, 2, 1.234e-05]}'
    with pytest.raises(ConfigError, match="like an image"):
        tools.shown([0] * 1000)


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [("cd", '{"folder": "a\'b"}', 'cd(folder="a\'b")'), ("cd", "", "cd()"), ("rm", "{}", "None"),
     ("cd", "[1]", "None"), ("cd", "{", "None"), ("cd", '{"x=1)or(y": 1}', "None")],
)  # fmt: skip
def test_only_literals_of_known_functions_become_code(name: str, arguments: str, code: str) -> None:
    assert tools.as_python({"name": name, "arguments": arguments}, {"cd"}) == code


def test_python_calls_become_tool_calls() -> None:
    docs = {"sort": {"parameters": {"properties": {"file_name": {}, "down": {}}}}}
    message = tools.as_tool_calls(["sort('a', down=True)"], docs)
    assert message is not None
    function = message["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"file_name": "a", "down": True}
    assert tools.as_tool_calls([], docs) is None


class Stairs(Episode):
    """Two players climb in turn; the third step wins, "fall" loses."""

    def reset(self) -> str:
        self.height, self.role = 0, "a"
        return "0"

    def step(self, reply: dict[str, Any]) -> tuple[str, float | None, bool]:
        self.height += 1 if reply["content"] == "climb" else 0
        self.role = "b" if self.role == "a" else "a"
        over = self.height == 3 or reply["content"] == "fall"
        return str(self.height), float(self.height == 3), over


def test_the_search_finds_the_fewest_replies_by_role() -> None:
    found = tools.shortest(Stairs, lambda game: ["fall", "wait", "climb"])
    assert found == {"a": ["climb", "climb"], "b": ["climb"]}
    assert tools.shortest(Stairs, lambda game: ["fall", "wait"]) is None


def test_names_are_split_and_ids_differ() -> None:
    train, heldout = (tools.fifths("abcdef", split) for split in ("train", "heldout"))
    assert [row["input"] for row in heldout] == ["e"]
    assert [row["input"] for row in train] == list("abcdf")
    few = [row["id"] for split in ("train", "heldout") for row in tools.fifths("ab", split)]
    assert few == ["train/a", "train/b", "heldout/a", "heldout/b"]


def test_a_role_that_never_moved_has_no_reward() -> None:
    rows = tools.by_role({"a": -1.0, "b": 1.0}, {"a"})
    assert [(row.scope, row.target, row.value) for row in rows] == [("role", "a", -1.0)]
