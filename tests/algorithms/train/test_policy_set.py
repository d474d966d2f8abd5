"""Several policies in one run: what each is trained with, when it learns, and what is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from msgspec.structs import replace

from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.presets import registry
from agentrl.algorithms.sampling.curriculum import DIFFICULTY, Curriculum
from agentrl.algorithms.train import serving as module
from agentrl.algorithms.train.checkpoint import export_checkpoint, load_checkpoint, save_checkpoint
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.algorithms.train.metrics import merge_policies
from agentrl.algorithms.train.policies import PolicySet
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.algorithms.train.stages import group_requirements, load_algorithms, make_policies
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import RunConfig, derived, resolve
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.core.types import Group, Reward, StepReward
from tests.algorithms.train.test_update import Recorder, group

TWO = {
    "planner": {"roles": ["planner"], "lora": {"rank": 4}},
    "solver": {"roles": ["solver"], "lora": {"rank": 2}},
}


def config(policies: Any = None, model: Path | str = "m", **settings: Any) -> RunConfig:
    base = {"policy": {"model": str(model), "device": "cpu"}, "steps": 12}
    return resolve(base | {"policies": policies or TWO} | settings, source="run.toml")


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "every", "expected"),
    [
        ("together", 1, ["abc"] * 7),
        ("alternating", 1, ["a", "b", "c", "a", "b", "c", "a"]),
        ("alternating", 2, ["a", "a", "b", "b", "c", "c", "a"]),
        ("sequence", 2, ["a", "a", "b", "b", "c", "c", "c"]),
    ],
)
def test_whose_turn_it_is_depends_on_the_step_alone(
    schedule: str, every: int, expected: list[str]
) -> None:
    three = {name: {"roles": [name], "lora": {"rank": 1}} for name in "abc"}
    made = config(three, team={"schedule": schedule, "every": every}, steps=7)
    learning = ["".join(n for n in "abc" if derived.learns_in_step(made, n, s)) for s in range(7)]
    assert learning == expected
    for name in "abc":
        counted = [sum(name in turn for turn in expected[:step]) for step in range(8)]
        assert [derived.steps_learned(made, name, step) for step in range(8)] == counted
        assert derived.view(made, name).steps == counted[-1]


# -- what ------------------------------------------------------------------------------------------


def recording(
    made: RunConfig, recorder: Callable[[str], Any] = lambda policy: None
) -> tuple[PolicySet, dict[str, Recorder]]:
    learners = {name: Recorder() for name in derived.trained_policies(made)}
    updaters = {
        name: Updater(
            derived.view(made, name),
            registry.make("grpo", {}),
            learner,
            recorder=recorder(name),
            policy=name,
        )
        for name, learner in learners.items()
    }
    return PolicySet(made, updaters), learners


def shared(name: str, *rewards: float) -> Group:
    """Each rollout has a call of the planner and one of the solver."""
    made = group(name, *rewards)

    def both(rollout: Any) -> Any:
        (call,) = rollout.transitions
        names = ("planner", "solver")
        return replace(
            rollout,
            transitions=[replace(call, id=f"{call.id}-{n}", policy=n, role=n) for n in names],
        )

    return replace(made, rollouts=[both(rollout) for rollout in made.rollouts])


def test_each_policy_learns_its_calls_by_its_settings() -> None:
    algorithm = {"lr": 0.25, "schedule": "linear"}
    made = config(
        {
            "planner": TWO["planner"] | {"algorithm": {"lr": 1.0}},
            "solver": TWO["solver"] | {"algorithm": {"schedule": "constant"}},
        },
        algorithm=algorithm,
        steps=4,
    )
    whole, learners = recording(made)
    measured = whole.update(2, [shared("g", 1.0, 0.0)])
    assert learners["planner"].rates == [0.5]  # half of the way from 1 to 0
    assert learners["solver"].rates == [0.25]
    for name, learner in learners.items():
        (batch,) = learner.batches
        assert [id.rpartition("-")[2] for id in batch.transitions] == [name] * 2
        assert measured[f"{name}/tokens/completion"] == 4
        assert measured[f"{name}/calls"] == 2
    assert measured["tokens/completion"] == 8
    assert measured["reward/mean"] == 0.5
    assert "planner/reward/mean" not in measured
    assert "loss" not in measured


def test_a_policy_whose_turn_it_is_not_changes_in_nothing() -> None:
    made = config(team={"schedule": "alternating"}, algorithm={"warmup": 1}, steps=4)
    whole, learners = recording(made)
    for step in range(3):
        whole.update(step, [shared(f"g{step}", 1.0, 0.0)])
    lr = made.algorithm.lr
    assert learners["planner"].rates == [lr / 2, lr]  # the warm-up counts its own steps
    assert learners["solver"].rates == [lr / 2]
    assert whole.versions(3) == {"planner": 2, "solver": 1}
    for name, updater in whole.updaters.items():  # the solver's are of an earlier step
        updater.preprocessor.step_rewards[:] = [StepReward(rollout=name, reward=Reward(value=1.0))]
    assert [row.rollout for row in whole.step_rewards(2)] == ["planner"]


def test_credit_is_kept_of_each_policys_own_calls() -> None:
    from agentrl.algorithms.credit.dump import CreditRecorder

    whole, learners = recording(config(steps=4), CreditRecorder)
    found = [shared("g", 1.0, 0.0)]
    whole.update(2, found)
    assert {(row.transition, row.policy) for row in whole.credits(2, found)} == {
        (f"g/{i}-{name}", name) for i in range(2) for name in learners
    }
    assert whole.credits(2, []) == []  # those of calls in no store are not committed
    whole, _ = recording(config(team={"schedule": "alternating"}, steps=4), CreditRecorder)
    for step in range(3):
        whole.update(step, [shared(f"g{step}", 1.0, 0.0)])
    assert {row.policy for row in whole.credits(2, [shared("g2", 1.0, 0.0)])} == {"planner"}


def test_a_policy_with_nothing_to_learn_is_skipped_alone() -> None:
    whole, learners = recording(config())
    mixed = shared("g", 1.0, 0.0)
    silent = replace(
        mixed,
        rollouts=[
            replace(row, transitions=[c for c in row.transitions if c.policy == "planner"])
            for row in mixed.rollouts
        ],
    )
    measured = whole.update(0, [silent])
    assert [len(learner.batches) for learner in learners.values()] == [1, 0]
    assert (measured["planner/groups/dropped"], measured["solver/groups/dropped"]) == (0, 1)
    assert measured["solver/update/skipped"] == measured["update/skipped"] == 1


def test_staleness_counts_the_updates_of_the_policy() -> None:
    made = config(team={"schedule": "alternating"}, steps=8)
    whole, _ = recording(made)
    old = shared("g", 1.0, 0.0)
    calls = [[replace(c, version=2) for c in row.transitions] for row in old.rollouts]
    rows = [replace(r, transitions=c) for r, c in zip(old.rollouts, calls, strict=True)]
    measured = whole.update(6, [replace(old, rollouts=rows)])  # the planner's fourth step
    assert measured["planner/staleness/version_max"] == 1


@pytest.mark.parametrize(("ahead", "withheld"), [(0, True), (0.5, False)])
def test_a_policy_withholds_what_is_too_old_by_its_own_updates(
    ahead: float, withheld: bool
) -> None:
    tables = {"max_staleness": ahead, "preset": "grpo+tis"}
    whole, learners = recording(config(team={"schedule": "alternating"}, steps=8, algorithm=tables))
    fresh = shared("g", 1.0, 0.0)
    rows = [
        replace(row, transitions=[replace(call, version=2) for call in row.transitions])
        for row in fresh.rollouts
    ]
    whole.update(5, [replace(fresh, rollouts=rows)])  # the solver's third step, so lag 0
    measured = whole.update(6, [replace(fresh, rollouts=rows)])  # the planner's fourth, lag 1
    assert learners["solver"].coefficients[0].any()
    assert bool(learners["planner"].batches) is not withheld
    assert (measured["planner/staleness/withheld"] > 0) is withheld


def test_counts_are_added_and_measurements_kept_apart() -> None:
    measured = merge_policies(
        {"rollouts": 8.0},
        {
            "a": {"rollouts": 8.0, "calls": 2.0, "loss": 0.5},
            "b": {"rollouts": 8.0, "calls": 3.0, "loss": 0.1},
        },
    )
    assert measured == {
        **{"rollouts": 8.0, "calls": 5.0},
        **{"a/calls": 2.0, "a/loss": 0.5, "b/calls": 3.0, "b/loss": 0.1},
    }


def test_algorithms_that_want_other_groups_are_refused() -> None:
    made = config({**TWO, "solver": TWO["solver"] | {"algorithm": {"preset": "dapo"}}})
    with pytest.raises(ConfigError, match=r"policies.planner and policies.solver learn from the"):
        group_requirements(made, load_algorithms(made))
    plain = replace(made, algorithm=replace(made.algorithm, dynamic_sampling=False))
    assert group_requirements(plain, load_algorithms(plain)) == (False, None)


def test_what_one_policy_cannot_use_is_refused_by_its_name() -> None:
    made = config({**TWO, "solver": TWO["solver"] | {"critic": {"model": "shared"}}})
    with pytest.raises(ConfigError, match=r"policies.solver: critic.model is set, and algorithm"):
        load_algorithms(made)


# -- weights ---------------------------------------------------------------------------------------


def test_adapters_of_a_model_share_it_and_whole_models_do_not(
    tiny_model_dir: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    policies = {
        **TWO,
        "coder": {"roles": ["coder"], "model": str(tiny_llama_dir)},
        "judge": {"roles": ["judge"], "frozen": True, "model": str(tiny_model_dir)},
    }
    made = config(policies, tiny_model_dir, output=str(tmp_path))
    bases = load_policies(made)
    assert [base.policies for base in bases] == [["planner", "solver"], ["coder"], ["judge"]]
    assert bases[0].adapters is not None
    assert bases[0].adapters.names == ["planner", "solver"]
    assert [bases[0].adapters.rank(name) for name in TWO] == [4, 2]
    assert bases[1].model.config.model_type == "llama"
    bases[0].adapters.save("solver", tmp_path / "kept")
    kept = {"roles": ["helper"], "frozen": True, "lora": {"adapter": str(tmp_path / "kept")}}
    (base,) = load_policies(config({**TWO, "helper": kept}, tiny_model_dir, output=str(tmp_path)))
    assert base.policies == ["planner", "solver", "helper"]
    assert base.adapters is not None
    assert base.adapters.rank("helper") == 2


def learner_of(whole: PolicySet, name: str) -> Any:
    return whole.updaters[name].learner


def build(made: RunConfig) -> PolicySet:
    algos, models = load_algorithms(made), load_policies(made)
    policies = make_policies(made, algos, models, AsyncExitStack())
    policies.state.parts[DIFFICULTY] = Curriculum(made).difficulty.means
    return policies


def test_a_checkpoint_holds_every_policy_in_its_folder(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    policies = {**TWO, "coder": {"roles": ["coder"], "model": str(tiny_model_dir)}}
    own = {"output": str(tmp_path), "learner": {"threads": 1}, "tasks": {"order": "difficulty"}}
    made = config(policies, tiny_model_dir, **own)
    whole, again = build(made), build(made)
    whole.state.parts["difficulty"].restore({"a task": [0.25, 4]})
    with torch.no_grad():
        for name in policies:
            for parameter in learner_of(whole, name).optimizer.parameters.values():
                parameter.add_(0.01)
    save_checkpoint(tmp_path / "000003", whole, state=whole.dump())
    assert sorted(p.name for p in (tmp_path / "000003").iterdir()) == [
        "SHA256SUMS", "coder", "planner", "solver", "state.json",
    ]  # fmt: skip
    again.restore(load_checkpoint(tmp_path / "000003", again))
    assert again.state.parts["difficulty"].dump() == {"a task": (0.25, 4)}
    for name in policies:
        theirs = learner_of(again, name).optimizer.parameters
        for key, parameter in learner_of(whole, name).optimizer.parameters.items():
            assert torch.equal(parameter, theirs[key])
    export_checkpoint(tmp_path / "000003" / "solver", tmp_path / "exported")
    assert (tmp_path / "exported" / "adapter_model.safetensors").is_file()
    fewer = recording(config({"planner": TWO["planner"]}))[0]
    with pytest.raises(PolicyError, match="of the policies planner, solver, coder, and this run"):
        fewer.restore(whole.dump())


# -- serving ---------------------------------------------------------------------------------------


async def ask(row: tuple[str, int, str, str]) -> tuple[str, str]:
    """The greedy answer of a policy, and the version that gave it."""
    body = {"model": row[3], "messages": [{"role": "user", "content": "Hello"}]}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(
            f"{row[2]}/chat/completions", json=body | {"max_tokens": 6, "temperature": 0}
        )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.headers["x-policy-version"]


async def test_only_what_has_learned_is_published(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = []

    class Server:
        base_url, model = "http://x/v1", "m"

        @asynccontextmanager
        async def updating(self) -> AsyncIterator[None]:
            yield

        async def publish(self, version: int, policy: str) -> None:
            published.append((policy, version))

    monkeypatch.setattr(module, "policy_server", lambda *given: Server())
    made = config(TWO, tiny_model_dir, output=str(tmp_path))
    serving = PolicyServers(made, load_policies(made))
    for versions in ((0, 0), (1, 0), (1, 0), (1, 1)):
        await serving.publish(dict(zip(TWO, versions, strict=True)))
    assert published == [("planner", 1), ("solver", 1)]
    clock = iter(range(100))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    async with serving.updating():  # the clock reads 0; idle_seconds reads it twice
        assert serving.idle_seconds() == 1
    async with serving.updating():
        assert serving.idle_seconds() > 1  # the rest of the update before, too


async def test_a_server_that_does_not_start_leaves_no_other_behind(
    tiny_model_dir: Path, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    class Server:
        def __init__(self, *given: Any) -> None:
            self.name = given[-1]

        async def start(self) -> None:
            happened.append(f"start {self.name}")
            if self.name == "coder":
                raise PolicyError("no room")

        async def close(self) -> None:
            happened.append(f"close {self.name}")

    monkeypatch.setattr(module, "policy_server", Server)
    policies = {**TWO, "coder": {"roles": ["coder"], "model": str(tiny_llama_dir)}}
    made = config(policies, tiny_model_dir, output=str(tmp_path))
    with pytest.raises(PolicyError, match="no room"):
        await PolicyServers(made, load_policies(made)).start()
    assert happened == ["start planner", "start coder", "close planner"]


@pytest.mark.parametrize("frozen", [0, 3])
async def test_servers_are_told_of_frozen_policies_before_they_start(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: int
) -> None:
    happened: list[object] = []

    class Server:
        async def start(self) -> None:
            happened.append("start")

        def make_room(self, policies: int) -> None:
            happened.append(policies)

        async def close(self) -> None:
            pass

    monkeypatch.setattr(module, "policy_server", lambda *given: Server())
    made = config(TWO, tiny_model_dir, output=str(tmp_path))
    await PolicyServers(made, load_policies(made)).start(frozen=frozen)
    assert happened == ([frozen, "start"] if frozen else ["start"])


def test_weights_change_in_flight_only_where_the_server_can(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(TWO, tiny_model_dir, output=str(tmp_path))
    settings = replace(made.algorithm, async_sampling="in_flight", max_staleness=1.0)
    made = replace(made, algorithm=settings)
    models = load_policies(made)
    served = PolicyServers(made, models)._servers["planner"]
    assert isinstance(served, EmbeddedServer)
    assert served.in_flight
    assert served._copy[0] is not models[0].model
    monkeypatch.setattr(module, "policy_server", lambda *given: object())
    with pytest.raises(ConfigError, match="'embedded' cannot change weights while calls run"):
        PolicyServers(made, models)


async def test_every_policy_is_served_by_name_with_its_own_version(
    tiny_model_dir: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    policies = {**TWO, "coder": {"roles": ["coder"], "model": str(tiny_llama_dir)}}
    bases = load_policies(config(policies, tiny_model_dir, output=str(tmp_path)))
    adapters = bases[0].adapters
    assert adapters is not None
    with torch.no_grad():
        for parameter in adapters.parameters("solver").values():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    adapters.save("solver", tmp_path / "adapter")
    serving = PolicyServers(config(policies, tiny_model_dir, output=str(tmp_path)), bases)
    await serving.start()
    try:
        async with serving.updating():
            await serving.publish({"planner": 3, "solver": 0, "coder": 1})
        rows = {row[0]: row for row in serving.table()}
        said = {name: await ask(row) for name, row in rows.items()}
        assert {name: version for name, (_, version) in said.items()} == {
            "planner": "3", "solver": "0", "coder": "1",
        }  # fmt: skip
        assert len({text for text, _ in said.values()}) == 3
        async with serving.updating():
            await serving.freeze("solver@000002", tmp_path / "adapter", 2)
            await serving.freeze("coder@000002", tiny_llama_dir, 2)
            with torch.no_grad():
                for parameter in adapters.parameters("solver").values():
                    parameter.zero_()
            await serving.publish({"solver": 4})
        rows = {row[0]: row for row in serving.table()}
        assert await ask(rows["solver@000002"]) == (said["solver"][0], "2")
        assert await ask(rows["coder@000002"]) == (said["coder"][0], "2")
        assert await ask(rows["solver"]) == (said["planner"][0], "4")
        with pytest.raises(PolicyError, match="is served already"):
            async with serving.updating():
                await serving.freeze("solver@000002", tmp_path / "adapter", 2)
        async with serving.updating():
            await serving.drop("solver@000002")
            await serving.drop("coder@000002")
        assert {row[0] for row in serving.table()} == set(policies)
        assert adapters.names == ["planner", "solver"]
        with pytest.raises(AssertionError, match="no model 'solver@000002' is served here"):
            await ask(rows["solver@000002"])
        assert await ask(rows["planner"]) == said["planner"]
    finally:
        await serving.close()
