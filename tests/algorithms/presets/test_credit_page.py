"""The numbers of CREDIT.md are what its settings give on its trace.

`python tests/algorithms/presets/test_credit_page.py` writes them again.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import agentrl.algorithms
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.sampling.replays import (
    RoleRewards,
    check_counterfactuals,
    coalition_formula,
)
from agentrl.core.config import resolve
from agentrl.core.types import POLICY, Branch, Group, Reward, Rollout, Scope
from agentrl.explain import explain
from tests import factories
from tests.algorithms.presets.limits import learned, limits, summed

PAGE = Path(str(agentrl.algorithms.__file__)).parent / "CREDIT.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
CHOICE = re.compile(r"# (\w)( \(psi\))?: .*\n")
ROW = re.compile(r"^\| (\w) \|.*$", re.MULTILINE)


def trace(block: str) -> Group:
    """The rollouts of a JSON block; every call is a row of its own."""
    rollouts = []
    for u, played in enumerate(json.loads(block)):
        name, rewards, calls = "ABC"[u], [], []
        if "outcome" in played:
            rewards.append(Reward(value=played["outcome"]))
        for i, call in enumerate(played["calls"]):
            n = call["tokens"]
            calls.append(
                factories.call(
                    f"{name}{i + 1}",
                    [9, u, i],
                    range(n),
                    attempt=name,
                    index=i,
                    role=call.get("role", "agent"),
                    messages=[{"role": "user", "content": call["sees"]}],
                )
            )
            if "process" in call:
                rewards.append(
                    Reward(
                        value=call["process"], name="process",
                        scope=Scope.TRANSITION, target=f"{name}{i + 1}",
                    )
                )  # fmt: skip
        whole = factories.rollout(name, calls, rewards, index=u)
        rollouts += [whole, *replayed(whole, played.get("without", {}))]
    return factories.group(*rollouts)


def replayed(source: Rollout, outcomes: dict[str, float]) -> Iterator[Rollout]:
    """The replays of a rollout, by the roles that they are without."""
    for roles, outcome in outcomes.items():
        without = roles.split()
        yield replace(
            source,
            id=f"{source.id} without {roles}",
            branch=Branch(rollout=source.id, calls=len(source.transitions), without=without),
            rewards=[Reward(value=outcome)],
        )


def rows(page: str) -> Iterator[tuple[str, str]]:
    """Each lettered choice with its row: the advantage, or for a choice of average psi, of every
    token of the trace before it, in order of rollouts and calls."""
    group = None
    for kind, block in BLOCK.findall(page):
        if kind == "json":
            group = trace(block)
        letter = CHOICE.match(block)
        if kind != "toml" or not letter:
            continue
        assert group is not None
        config = resolve(tomllib.loads(block), source=letter[1])
        settings = config.algorithm
        algo = make(settings.preset, settings.options)
        check_counterfactuals(config, {"policy": algo}, None)
        explanation = explain(
            algo, RoleRewards(coalition_formula(config), POLICY).complete([group])
        )
        advantage = explanation.chain[-1].columns["advantage"]
        numbers = explanation.psi if letter[2] else advantage
        cells = ["-" if x != x else f"{x:+.3f}".replace("+0.000", "0") for x in numbers.tolist()]
        yield letter[1], f"| {letter[1]} | {' | '.join(cells)} |"


def written(page: str) -> str:
    fresh = dict(rows(page))
    return ROW.sub(lambda row: fresh[row[1]], page)


def test_the_page_says_what_the_code_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    letters = [letter for letter, _ in rows(page)]
    assert letters == [row[1] for row in ROW.finditer(page)]
    assert len(set(letters)) == len(letters) > 8
    assert written(page) == page


def test_the_limits_are_what_enumeration_gives() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [f"| {name} | {figures} |" for name, figures in limits()]
    assert [row for row in rows if row not in page] == []


def test_a_qmix_critic_cannot_learn_a_non_monotone_game() -> None:
    assert abs(learned("qmix")) < 1 < summed()["exact"]


def test_a_vdn_critic_comes_to_the_nearest_sum() -> None:
    assert learned("vdn") == pytest.approx(summed()["vdn"], abs=0.2)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
