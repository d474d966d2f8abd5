"""Rollouts of environments: rewards on their calls, roles, and what a plug-in does wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from agentrl.core.config.derived import EnvironmentName
from agentrl.core.types import ErrorKind, Rollout, RolloutState, Scope
from agentrl.environments import Endpoint, EpisodeError, play
from agentrl.environments.hosted import load_class
from agentrl.environments.runner import stage
from tests.agentrl.environments.conftest import HERE, Play, named, settings
from tests.agentrl.environments.worlds import Walk
from tests.runners.conftest import Bench


def said(text: str) -> Any:
    return lambda body: {"role": "assistant", "content": text}


def rewards(rollout: Rollout, scope: Scope) -> list[tuple[str, float, str | None]]:
    return [(row.name, row.value, row.target) for row in rollout.rewards if row.scope is scope]


async def test_rewards_of_steps_are_on_their_calls_and_sum_to_the_outcome(
    bench: Bench, play: Play
) -> None:
    bench.model.answer = said("right")
    rollouts = await play(settings("Line:3"))
    for rollout in rollouts:
        assert rollout.state is RolloutState.SUCCEEDED
        calls = [call.id for call in rollout.transitions]
        steps = rewards(rollout, Scope.TRANSITION)
        assert steps == [("step", -0.1, calls[0]), ("step", 0.9, calls[1])]
        assert rewards(rollout, Scope.ROLLOUT) == [("outcome", pytest.approx(0.8), None)]
    first, second = bench.model.requests[0]["messages"], bench.model.requests[-1]["messages"]
    assert [message["role"] for message in first] == ["user"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]


async def test_what_goes_wrong_in_one_rollout_is_no_other_ones(bench: Bench, play: Play) -> None:
    bench.model.answer = said("right")
    refused = await play(settings("Line:1", environment_options={"fault": "step raises"}), times=3)
    assert [rollout.failure.kind for rollout in refused] == [ErrorKind.VERIFIER] * 3
    (rollout,) = await play(settings("Line:1"))
    assert rollout.state is RolloutState.SUCCEEDED


FAULTS = {
    "open raises": "open raised RuntimeError: no line",
    "no episode": "open returned None, which is no Episode",
    "reset raises": "reset raised RuntimeError: no board",
    "reset says a dict": "what an episode says is {'not': 'a text'}; make it a text",
    "step raises": "step raised KeyError: 'move'",
    "step exits": "step raised SystemExit: 3",
    "step skips": "step raised Skipped: no dice",
    "step closes": "step raised GeneratorExit",
    "step gives two": "step returned ('a', 1.0); return what is said next",
    "nan": "step gave the reward nan; return a finite number or None",
    "huge": "step gave the reward 1e+300; return a smaller number or None",
    "text": "step gave the reward 'much'",
    "bytes": "step gave the reward bytearray(b'1.0')",
    "ends by a text": "step returned 'False' as whether the episode has ended",
    "ends by nothing": "step returned None as whether the episode has ended",
    "no reward": "an episode ended without a reward; give one in step or in rewards",
    "never ends": "an episode had not ended after 8 turns; let step end it",
    "rewards raises": "rewards raised ValueError: no score",
    "empty": "it returned no reward",
    "nan score": "it returned nan as 'a'",
    "list": "it returned 1.0 in a list; return agentrl.Reward",
    "late": "close gave a reward, after the end",
    "close raises": "close raised OSError: gone",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_a_plug_in_does_wrong_fails_its_rollout_in_a_sentence(
    bench: Bench, play: Play, fault: str
) -> None:
    bench.model.answer = said("right")
    options = {"fault": fault}
    (rollout,) = await play(settings("Line:1", environment_options=options), error_reward=0.0)
    assert rollout.state is RolloutState.FAILED
    assert rollout.rewards == []  # never 0
    assert rollout.failure.kind is ErrorKind.VERIFIER
    start = f"EpisodeError: worlds.py:Line:1: {FAULTS[fault]}"
    assert rollout.failure.message.startswith(start)
    assert "\n" not in rollout.failure.message


@pytest.mark.parametrize("what", ["open", "reset"])
async def test_what_connects_after_its_rollout_timed_out_is_closed(play: Play, what: str) -> None:
    config = settings("Line:1", environment_options={"fault": f"{what} connects late"})
    (rollout,) = await play(config, timeout=0.5, max_attempts=1)
    assert rollout.failure.kind is ErrorKind.TIMEOUT
    connections = load_class(named(config)).open.__globals__["connections"]
    assert connections == []
    for _ in range(200):
        if len(connections) == 2:
            break
        await asyncio.sleep(0.05)
    assert connections == ["connected", "closed"]


async def test_an_environment_may_call_the_model_itself_and_others_by_role(
    bench: Bench, play: Play
) -> None:
    config = settings("Driver:x", roles={"user": "policy"})
    for rollout in await play(config):
        roles = [call.role for call in rollout.transitions]
        assert roles == ["user", "agent"]
        found = dict(row[:2] for row in rewards(rollout, Scope.ROLLOUT))
        assert found == {"outcome": len("echo echo train 0"), "asked": 1.0}
    assert bench.model.requests[-1]["max_tokens"] == 9


async def test_a_plain_function_runs_in_a_thread(bench: Bench, play: Play) -> None:
    (rollout,) = await play(settings("Blocking:x"))
    assert rewards(rollout, Scope.ROLLOUT) == [("outcome", 1.0, None)]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raises", "run raised RuntimeError: no world"),
        ("no reward", "it returned no reward"),
        ("undeclared role", "the environment asks models in the role 'judge', which its `roles`"),
    ],
)
async def test_what_run_does_wrong_fails_its_rollout(play: Play, fault: str, why: str) -> None:
    config = settings("Driver:x", roles={"user": "policy"}, environment_options={"fault": fault})
    for rollout in await play(config):
        assert rollout.rewards == []
        assert rollout.failure.message.startswith(f"EpisodeError: worlds.py:Driver:x: {why}")


async def test_a_failed_model_call_is_the_models_failure(bench: Bench, play: Play) -> None:
    async def broken(request: Any, body: Any) -> Any:
        from aiohttp import web

        return web.json_response({"error": {"message": "no memory"}}, status=500)

    bench.model.then(*[broken] * 100)
    (rollout,) = await play(settings("Line:1"), timeout=1.0, max_attempts=1)
    assert rollout.failure.kind is ErrorKind.MODEL
    assert "no memory" in rollout.failure.message


async def test_opponents_are_roles_with_rewards_of_their_own(bench: Bench, play: Play) -> None:
    config = settings("Duel:x", roles={"black": "policy", "white": "policy"})
    (rollout,) = await play(config)
    by_id = {call.id: call.role for call in rollout.transitions}
    assert Counter(by_id.values()) == {"black": 2, "white": 2}
    steps = [(value, by_id[str(call)]) for _, value, call in rewards(rollout, Scope.TRANSITION)]
    assert steps == [(1.0, "black"), (-2.0, "white")] * 2
    assert rewards(rollout, Scope.ROLE) == [("outcome", 2.0, "black"), ("outcome", -4.0, "white")]
    assert rewards(rollout, Scope.ROLLOUT) == [("outcome", -1.0, None)]  # none of them is the agent
    asked = [body["messages"] for body in bench.model.requests]
    assert [len(messages) for messages in asked] == [2, 1, 1, 1]  # each move is one of its own


async def test_a_data_set_is_played_by_one_call_or_by_the_run_files_agent(
    bench: Bench, play: Play
) -> None:
    rollouts = await play(settings("Questions:x"))
    assert [rollout.result for rollout in rollouts] == [f"echo train {index}" for index in range(3)]
    assert [rollout.rewards[0].value for rollout in rollouts] == [1.0] * 3
    own = settings(
        "Questions:x",
        agent={"path": "own_agent.py:agent"},
        verifier={"rewards": {"long": "own_agent.py:long"}},
    )
    assert own.verifier.path.startswith("environment:verifier:")
    for rollout in await play(own):
        assert rollout.rewards[0].value == 0.0
        assert rollout.result == "nothing"


async def test_an_agent_cannot_say_what_its_reward_is(play: Play) -> None:
    own = settings("Questions:x", agent={"path": "own_agent.py:forger"})
    for rollout in await play(own):
        assert rollout.result["environment"] == "worlds.py:Questions:x"
        assert [row.value for row in rollout.rewards if row.name == "outcome"] == [0.0]


async def test_a_verifier_that_raises_fails_its_rollout(play: Play) -> None:
    config = settings("Questions:x", environment_options={"fault": "raises"})
    for rollout in await play(config):
        assert rollout.rewards == []
        assert rollout.failure.kind is ErrorKind.VERIFIER
        assert (
            "worlds.py:Questions:x: verify raised RuntimeError: no key" in rollout.failure.message
        )


class Scripted(Endpoint):
    async def chat(self, messages: Any, tools: Any = None, **sampling: Any) -> Any:
        return {"role": "assistant", "content": "right"}


async def test_episodes_are_played_outside_of_rollouts_too() -> None:
    rows = await play(Walk(3), Scripted("", ""), name="walk")
    assert [row.value for row in rows] == [pytest.approx(0.7)]
    with pytest.raises(EpisodeError, match=r"walk: an episode had not ended after 2 turns"):
        await play(Walk(3), Scripted("", ""), 2, name="walk")


ZERO = {"on_truncation": "zero", "error_reward": -1.0, "timeout": 2.0, "calls_optional": True}


@pytest.mark.parametrize(
    ("world", "fault", "says"),
    [
        ("Line", "step hangs", "Line: the rollout ran longer than 2 s, and its time ended in the"),
        ("Driver", "blocks", "Driver: the rollout ran longer than 2 s, and its time ended in the"),
        ("Alone", "step hangs", "Alone: the rollout ran longer than 2 s, and its time ended in"),
        ("Alone", "process ends", "Alone: its process ended with exit status 7"),
    ],
)
async def test_an_environment_that_hangs_or_ends_is_not_paid_as_an_agent_would_be(
    world: str, fault: str, says: str
) -> None:
    named = EnvironmentName.read(f"worlds.py:{world}:1", {"fault": fault}, HERE)
    task = {"id": "a", "input": {"goal": 2} if world != "Driver" else "x"}
    roles = {"*": "script"}
    async with stage(named, timeout=2.0, agent=ZERO, roles=roles) as on:

        async def right(role: str, messages: Any, tools: Any) -> Any:
            return {"role": "assistant", "content": "right"}

        done = await on.play(task, right)
    assert (done.outcome, done.rewards) == (None, {})
    assert says in done.problem.replace("worlds.py:", "").replace(":1:", ":").replace("\n", " ")


async def test_what_a_policy_that_takes_too_many_turns_gets_is_set_by_the_run_file() -> None:
    named = EnvironmentName.read("worlds.py:Line:1", {"goal": 3}, HERE)
    async with stage(named, timeout=6.0, agent=ZERO) as on:

        async def slow(role: str, messages: list[Any], tools: Any) -> Any:
            await asyncio.sleep(2.5)  # below half of the time, which the server would be blamed for
            return {"role": "assistant", "content": "right"}

        done = await on.play({"id": "a", "input": {"goal": 3}}, slow)
    assert done.outcome == 0.0
    assert "the agent ran longer than 6 s, waiting for 1 model call" in done.problem
