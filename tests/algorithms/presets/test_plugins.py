"""Presets and credit functions from outside the library."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.objective.core import Algo, compute_advantages
from agentrl.algorithms.objective.ratios import Clip
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import modifier, preset
from agentrl.algorithms.presets.registry import library_presets, make
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.config.derived import check_presets
from agentrl.core.errors import ConfigError, TrainingError
from tests.algorithms.worlds import Call, Play, world
from tests.factories import Register

HEAD = "from agentrl.algorithms import Algo, GroupRelative, preset\n"


@pytest.fixture(autouse=True)
def own_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers goes with it; families register themselves once, before."""
    library_presets()
    monkeypatch.setattr(declare, "presets", dict(declare.presets))
    monkeypatch.setattr(declare, "modifiers", dict(declare.modifiers))


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Register
) -> None:
    (tmp_path / "their_presets.py").write_text(HEAD + "def p(): return Algo(GroupRelative())")
    monkeypatch.syspath_prepend(tmp_path)
    register("agentrl.presets", "theirs", "their_presets:p")
    assert make("theirs+peers", {}).name == "theirs+peers"
    with pytest.raises(ConfigError, match=r"no preset 'theris'; did you mean 'theirs'"):
        make("theris", {})
    register("agentrl.presets", "grpo", "their_presets:p")
    with pytest.raises(ConfigError, match="hides the library's own 'grpo'"):
        make("grpo", {})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("p = 3", r"algorithm\.preset: 3 is int, not a function"),
        ("def q(): ...", r"has no 'p'"),
        ("1 / 0", r"raised ZeroDivisionError: division by zero \(.*mine_preset\.py:2\)"),
        (
            "def p(a): return Algo(a)",
            r"parameter 'a' of p \(.*mine_preset\.py:2\) is not a keyword",
        ),
        ("def p(*, a=1): return a", r"parameter 'a' of p \(.*:2\) is not a keyword-only option"),
        ("def p(**a: int): return a", r"parameter 'a' of p \(.*:2\) is not a keyword-only option"),
        ("def p(): return 3", r"p \(.*mine_preset\.py:2\) returned int, which is not an Algo"),
        ("def p(): return [][1]", r"p \(.*\.py:2\) raised IndexError: .* \(.*mine_preset\.py:2\)"),
        (
            "from agentrl.algorithms import Average\n@preset('p', average='row')\n"
            "def p(): return Algo(GroupRelative(), agg=Average(('all',)))",
            r"p \(.*:3\) returned an Algo with an agg, .*@preset\(average='row'\) would replace",
        ),
        (
            "@preset('p', average='row')\ndef p(*, length: int = 9): return Algo(GroupRelative())",
            r"the option 'length' of p \(.*:2\) is declared by @preset, too",
        ),
        (
            "@preset('p', clip=(0.2, 0.2))\n"
            "def p(*, clip_low: float = 0.1): return Algo(GroupRelative())",
            r"the option 'clip_low' of p \(.*:2\) is declared by @preset, too",
        ),
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
        return make("rloo+credit", options, root=tmp_path)

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


def test_an_installed_package_registers_modifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Register
) -> None:
    (tmp_path / "their_modifiers.py").write_text(
        HEAD + "from dataclasses import replace\n"
        "def m(algo: Algo, *, theirs_bonus: float = 0.5) -> Algo:\n"
        "    return replace(algo, entropy=theirs_bonus)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    register("agentrl.presets", "+theirs", "their_modifiers:m")
    assert make("grpo+theirs", {}, supplies=("old", "sampler", "entropy")).entropy == 0.5
    bonus = {"theirs_bonus": 2.0}
    assert make("rloo+theirs", bonus, supplies=("old", "sampler", "entropy")).entropy == 2.0
    check_presets(RunConfig(steps=1, algorithm=AlgorithmConfig(preset="grpo+theirs")))
    with pytest.raises(ConfigError, match=r"no modifier \+thiers .*did you mean 'theirs'"):
        make("grpo+thiers", {})


def test_two_packages_with_one_name_are_refused(register: Register) -> None:
    for module in ("ours", "theirs"):
        register("agentrl.presets", "treerl", f"{module}:treerl")
    with pytest.raises(ConfigError, match=r"ours:treerl and theirs:treerl .* have one name"):
        make("treerl", {})


def test_a_decorated_function_stays_a_function() -> None:
    def one(reward: str, *, std: bool = True) -> Algo:
        return Algo(GroupRelative(reward))

    assert preset("one", clip=(0.1, 0.2))(one) is one
    assert modifier("other")(one) is one
    assert make("one", {"clip_low": 0.0}).gates[0].fn == Clip(0.0, 0.2)
    assert one("style").gates == ()


# -- families --------------------------------------------------------------------------------------


def test_files_with_presets_of_one_name_keep_their_own_options(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, high in zip(folders, (0.3, 0.4), strict=True):
        folder.mkdir()
        (folder / f"mine_{folder.name}.py").write_text(
            HEAD + f"@preset('mine', clip=(0.2, {high}))\ndef p(): return Algo(GroupRelative())"
        )
    for folder, high in zip(folders * 2, (0.3, 0.4) * 2, strict=True):
        (gate,) = make(f"mine_{folder.name}.py:p", {}, root=folder).gates
        assert gate.fn == Clip(0.2, high)
