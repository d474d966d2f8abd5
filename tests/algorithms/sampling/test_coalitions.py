"""A team played again without its roles: a real client, the gateway, policy servers, the store, the
credit; then a whole run from the command line, which is stopped and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

import agentrl
from agentrl.algorithms.data.merge import build_batch, counterfactual
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.sampling.replays import RoleRewards, coalition_formula, replay_metrics
from agentrl.core.config import UpstreamConfig, resolve
from agentrl.core.types import RolloutState, Scope
from agentrl.store import open_store
from tests.algorithms.sampling.killed import RunnerSide, sampled
from tests.system import test_run
from tests.system.debate import written

ROLES, MUTE, SIZE = ("left", "right", "judge"), "no word", 2
SETTINGS = {
    "name": "run",
    "upstreams": {"mute": {"text": MUTE}},
    "sampling": {"max_tokens": 6},
    "algorithm": {
        "groups": 1,
        "group_size": SIZE,
        "counterfactual": {"substitutes": dict.fromkeys(ROLES, "mute"), "value": "shapley"},
    },
}


async def team(question: Any) -> list[str]:
    said = []
    async with openai.AsyncOpenAI() as client:
        for name in ROLES:
            with agentrl.role(name):
                answer = await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": str(question)}]
                )
            said.append(answer.choices[0].message.content or "")
    return said


def worth(said: str) -> float:
    return sum(said.encode()) % 17 / 16


def verify(task: Any, result: list[str]) -> float:
    return sum(map(worth, result))


async def test_what_each_role_adds_is_what_it_said(server: EmbeddedServer, tmp_path: Path) -> None:
    """Nobody hears the others, and the outcome is a sum: the Shapley value of a role is what its
    answer is worth more than that of its substitute, to the last bit of the replay."""
    config = resolve(SETTINGS, source="test")
    runner = RunnerSide(server, team, verify, {"mute": UpstreamConfig(text=MUTE)})
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        group = await sampled(store, config, runner, killed_at=SIZE + 3)
    assert {row.state for row in group.rollouts} == {RolloutState.SUCCEEDED}
    assert replay_metrics([group]) == {
        "replays": SIZE * 7,
        "replays/missing": 0,
        "calls/repeated": SIZE * (3 * 2 + 3 * 1),  # without one role, without two
    }
    (whole,) = RoleRewards(coalition_formula(config), "policy").complete([group])
    sources = [row for row in whole.rollouts if not counterfactual(row)]
    assert len(sources) == SIZE
    for row in sources:
        added = {r.target: r.value for r in row.rewards if r.scope is Scope.ROLE}
        gains = {
            call.role: worth((call.answer or {})["content"]) - worth(MUTE)
            for call in row.transitions
        }
        assert added == pytest.approx(gains, abs=1e-12)
    batch = build_batch([whole], reward_names=("role:shapley",))
    assert batch.rollouts == [row.id for row in sources]


RUN = """
[upstreams.mute]
text = "no word"
[sampling]
max_tokens = 4
[algorithm]
preset = "difference"
lr = 1e-2
groups = 1
group_size = 2
[algorithm.counterfactual]
substitutes = {{ left = "first", right = "first", judge = "mute" }}
"""
AGENT = """
import openai

import agentrl


async def agent(question):
    said = []
    async with openai.AsyncOpenAI() as client:
        for name in ("left", "right", "judge"):
            with agentrl.role(name):
                answer = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": f"{question} {said}"}]
                )
            said.append(answer.choices[0].message.content or "")
    return said
"""
VERIFIER = """
def verify(task, result):
    return float(len("".join(result)) % 7)
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """Two debaters and a judge, by two adapters, who are paid together."""
    return written(tmp_path, RUN, AGENT, VERIFIER, tiny_model_dir)


@pytest.mark.timeout(240)
async def test_first_versions_stand_in_for_what_learns(folder: Path) -> None:
    for steps in (1, 2):
        trained = test_run.agentrl(folder, "train", "run.toml", f"steps={steps}")
        assert trained.returncode == 0, trained.stderr
    async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}", create=False) as store:
        rollouts = await store.rollouts("debate")
        traces = {row.id: await store.trace(row.id) for row in rollouts}
        steps = [row for row in await store.steps("debate") if row.committed]
        served = await store.policies("debate")
    assert {name: row.version for name, row in served.items()} == {
        "debater": 2, "judge": 2, "debater@000000": 0,
    }  # fmt: skip
    players = {"left": "debater@000000", "right": "debater@000000", "judge": "mute"}
    replays = [row for row in rollouts if counterfactual(row)]
    absences = [row.branch.without for row in replays if row.branch]
    assert absences == [["judge"], ["left"], ["right"]] * 2 * 2
    for row in replays:
        trace = traces[row.id]
        assert trace is not None
        assert row.branch is not None
        (absent,) = row.branch.without
        made = {call.role: call for call in trace.transitions}
        assert (made[absent].policy, made[absent].repeats) == (players[absent], None)
        others = {role: call.policy for role, call in made.items() if role != absent}
        assert others.items() <= {"left": "debater", "right": "debater", "judge": "judge"}.items()
        assert all(made[role].repeats for role in ROLES[: ROLES.index(absent)])
        source = next(other for other in rollouts if other.id == row.branch.rollout)
        (given,) = [r for r in source.rewards if r.scope is Scope.ROLE and r.target == absent]
        assert given.value == source.reward() - row.reward()
        assert (given.name, given.source) == ("difference", "counterfactual")
    for step in steps:
        assert step.metrics["rollouts"] == 8
        assert step.metrics["replays"] == 6
        assert "judge/reward/role:difference/judge/mean" in step.metrics
    explained = test_run.agentrl(
        folder, "explain", rollouts[0].id, "--store", f"sqlite:///{folder / 'out' / 'store.db'}"
    )
    assert explained.returncode == 0, explained.stderr
    assert "role:difference" in explained.stdout
