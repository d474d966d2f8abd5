"""A team played again without its roles: a real client, the gateway, policy servers, the store, the
credit; then a whole run from the command line, which is stopped and continued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

import agentrl
from agentrl.algorithms.data.merge import build_batch, counterfactual
from agentrl.algorithms.diagnostics.metrics import replay_metrics
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.replays.branching import request_branches
from agentrl.algorithms.replays.counterfactuals import (
    RoleRewards,
    coalition_formula,
)
from agentrl.algorithms.sampling.collect import Collector
from agentrl.algorithms.sampling.task_sampler import TaskSampler
from agentrl.config import RunConfig, RunnerConfig, UpstreamConfig, resolve
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors.contract import environment
from agentrl.runners.executors.inprocess import InProcessExecutor, as_agent
from agentrl.runners.features import run_features
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.scoring.verifiers import Verifier
from agentrl.runners.worker import Worker
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Group, PolicyVersion, RolloutState, Scope
from tests.system import test_run

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


@pytest.fixture
async def server(tiny_model_dir: Path) -> AsyncIterator[EmbeddedServer]:
    model, tokenizer = load_model(str(tiny_model_dir), device="cpu")
    server = EmbeddedServer(model, tokenizer, max_batch=16)
    await server.start()
    yield server
    await server.close()


@asynccontextmanager
async def working(store: Store, server: EmbeddedServer) -> AsyncIterator[None]:
    """A runner at work, which stops where it is at the end."""
    await store.publish(
        PolicyVersion(
            run="run", policy="policy", version=0, base_url=server.base_url, model=server.model
        )
    )
    gateway = Gateway(
        store,
        "run",
        upstreams={"mute": UpstreamConfig(text=MUTE)},
        features=run_features(store),
    )
    gateway.start()
    stop = asyncio.Event()
    with environment(gateway.base_url):
        execution = AttemptRunner(
            store, gateway, InProcessExecutor(as_agent(team)), Verifier(verify)
        )
        worker = Worker("run", execution, RunnerConfig(concurrency=2, drain=0.0), name="test")
        running = asyncio.create_task(worker.run(stop))
        try:
            yield
        finally:
            stop.set()
            await running
    await asyncio.to_thread(gateway.close)


async def until(store: Store, succeeded: int) -> None:
    while (await store.counts("run")).succeeded < succeeded:
        await store.wait(await store.cursor(), timeout=1.0)


async def sampled(store: Store, server: EmbeddedServer, config: RunConfig) -> Group:
    """The group of step 0 with its replays; everything is killed while these are made."""
    tasks = TaskSampler(config, [{"input": "2 + 2"}])
    for killed in (True, False):
        state = await store.open_run("run", {})
        async with working(store, server):
            grow = partial(request_branches, store, config)
            collector = Collector(config, store, state.epoch, tasks, requested=grow)
            collecting = asyncio.create_task(collector.collect(0))
            if killed:
                await until(store, SIZE + 3)
                collecting.cancel()
            await asyncio.wait((collecting,))
    (group,) = collecting.result().groups
    return group


async def test_what_each_role_adds_is_what_it_said(server: EmbeddedServer, tmp_path: Path) -> None:
    """Nobody hears the others, and the outcome is a sum: the Shapley value of a role is what its
    answer is worth more than that of its substitute, to the last bit of the replay."""
    config = resolve(SETTINGS, source="test")
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        group = await sampled(store, server, config)
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
name = "debate"
output = "out"
steps = 2
[agent]
path = "agent.py:agent"
[tasks]
train = "tasks.jsonl"
[verifier]
path = "verifier.py:verify"
[policy]
model = "{model}"
[policies.debater]
roles = ["left", "right"]
lora.rank = 2
[policies.judge]
roles = ["judge"]
lora.rank = 4
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
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "verifier.py").write_text(VERIFIER)
    (tmp_path / "tasks.jsonl").write_text('{"input": "Oslo"}\n{"input": "Lima"}\n')
    (tmp_path / "run.toml").write_text(RUN.format(model=tiny_model_dir))
    return tmp_path


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
