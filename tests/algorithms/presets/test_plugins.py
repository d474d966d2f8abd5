"""Presets and credit functions from outside the library."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from math import inf
from pathlib import Path

import pytest

from agentrl.algorithms.objective.core import Algo, compute_advantages
from agentrl.algorithms.objective.ratios import Clip
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.catalogue import make
from agentrl.errors import ConfigError, TrainingError
from tests.algorithms.worlds import Call, Play, world

HEAD = "from agentrl.algorithms import Algo, GroupRelative, preset\n"


@pytest.fixture(autouse=True)
def own_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers goes with it."""
    monkeypatch.setattr(declare, "presets", dict(declare.presets))


def built(folder: Path, code: str, suffix: str = "", **options: object) -> Algo:
    """The preset `p` of a file with this code."""
    (folder / "mine_preset.py").write_text(HEAD + code)
    return make(f"mine_preset.py:p{suffix}", options, root=folder)


def test_a_plain_function_takes_modifiers_and_the_shared_reward(tmp_path: Path) -> None:
    code = "def p(reward: str, *, std: bool = True): return Algo(GroupRelative(reward))"
    algo = built(tmp_path, code, "+tis", reward="style", tis_cap=3.0)
    assert (algo.name, algo.rewards, len(algo.gates)) == ("mine_preset.py:p+tis", ("style",), 1)


def test_the_decorator_declares_shared_options(tmp_path: Path) -> None:
    code = """@preset("p", reward="style", clip=(0.1, 0.3, 2.0), clip_by="row", kl=True)
def p(reward: str) -> Algo:
    return Algo(GroupRelative(reward))
"""
    algo = built(tmp_path, code, clip_low=0.05)
    assert algo.rewards == ("style",)
    assert [(gate.fn, gate.by) for gate in algo.gates] == [(Clip(0.05, 0.3, 2.0), "row")]
    assert algo.penalties == ()
    with pytest.raises(ConfigError, match=r"options\.clip_low = -1: .*>= 0"):
        built(tmp_path, code, clip_low=-1)
    with pytest.raises(ConfigError, match=r"options\.clip_hi: .*did you mean 'clip_high'"):
        built(tmp_path, code, clip_hi=inf)


def test_an_installed_package_registers_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_presets.py").write_text(HEAD + "def p(): return Algo(GroupRelative())")
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("theirs", "their_presets:p", "agentrl.presets")]
    monkeypatch.setattr(
        "agentrl.config.base._entry_points",
        lambda group, path: EntryPoints(points).select(group=group),
    )
    assert make("theirs+tis", {}).name == "theirs+tis"
    with pytest.raises(ConfigError, match=r"no preset 'theris'; did you mean 'theirs'"):
        make("theris", {})
    points[0] = EntryPoint("grpo", "their_presets:p", "agentrl.presets")
    with pytest.raises(ConfigError, match="hides the library's own 'grpo'"):
        make("grpo", {})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("p = 3", r"algorithm\.preset: 3 is int, not a function"),
        ("def q(): ...", r"has no 'p'"),
        ("1 / 0", r"raised ZeroDivisionError: division by zero \(.*mine_preset\.py:2\)"),
        ("def p(a): return Algo(a)", r"parameter 'a' of p \(.*mine_preset\.py:2\) is no keyword"),
        ("def p(*, a=1): return a", r"parameter 'a' of p \(.*:2\) is no keyword-only option"),
        ("def p(**a: int): return a", r"parameter 'a' of p \(.*:2\) is no keyword-only option"),
        ("def p(): return 3", r"p \(.*mine_preset\.py:2\) returned int, which is no Algo"),
        ("def p(): return [][1]", r"p \(.*\.py:2\) raised IndexError: .* \(.*mine_preset\.py:2\)"),
        ("@preset('grpo')\ndef p(): ...", r"p \(.*:2\) hides the library's own 'grpo'"),
        (
            "from agentrl.algorithms import modifier\n@modifier('tis')\ndef p(algo): return algo",
            r"p \(.*:3\) hides the library's own 'tis'",
        ),
    ],
)
def test_what_is_no_preset_is_refused_with_its_place(
    tmp_path: Path, code: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(tmp_path, code)


def test_a_credit_function_takes_the_place_of_a_presets_own(tmp_path: Path) -> None:
    (tmp_path / "mine_credit.py").write_text(
        "from agentrl.algorithms import rewards\n"
        "def twice(batch): return 2 * rewards(batch, 'style')[batch.token_rollout]\n"
        "def short(batch): return rewards(batch, 'style')\n"
        "def none(batch): return None\n"
        "def two(batch, more): ...\n"
    )
    batch = world(*(Play([Call(), Call()], rewards={"style": x}) for x in (1.0, 3.0)))

    def algo(name: str) -> Algo:
        options = {"credit": f"mine_credit.py:{name}", "credit_reward": "style"}
        return make("gspo+credit", options, root=tmp_path)

    assert algo("twice").rewards == ("style",)
    assert compute_advantages(algo("twice"), batch).tolist() == [2, 2, 6, 6]
    with pytest.raises(TrainingError, match=r"short.* returned \(2,\); .* each of the 4 tokens"):
        compute_advantages(algo("short"), batch)
    with pytest.raises(TrainingError, match=r"none \(.*mine_credit\.py:4\) returned NoneType"):
        compute_advantages(algo("none"), batch)
    with pytest.raises(ConfigError, match=r"options\.credit: two \(.*:5\) must take \(batch\)"):
        algo("two")
    with pytest.raises(ConfigError, match=r"options\.credit = .*it has no 'thrice'; did you mean"):
        algo("thrice")
