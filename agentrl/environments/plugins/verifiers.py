"""Environments of the package verifiers: up to 0.3, and tasksets from 0.4."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl import reward
from agentrl.core.types import Json
from agentrl.environments import Endpoint, Environment
from agentrl.environments.plugins.verdicts import (
    PerRollout,
    digest,
    held_out,
    placeholder_key,
    scores_of_episode,
)

judge: Any = PerRollout()


class Verifiers(Environment):
    """verifiers up to 0.3. WHAT is a module with `load_environment`; a judge is the role
    `judge`."""

    requires = ("verifiers==0.3.1",)

    def __init__(self, what: str, **arguments: Any) -> None:
        sys.path.insert(0, str(self.root))
        with placeholder_key():
            import verifiers

            self.what, self.env = what, verifiers.load_environment(what, **arguments)
        for env in (self.env, *getattr(self.env, "envs", ())):
            env.add_trajectory_step = noted(env.add_trajectory_step)
            for rubric in (env.rubric, *getattr(env.rubric, "rubrics", ())):
                if rubric._get_group_reward_funcs():
                    raise ValueError("it scores the rollouts of a group together, not each alone")
                rubric.logger = Loud(rubric.logger, {})
                if hasattr(rubric, "judge_client"):
                    self.roles, rubric.judge_client = ("judge",), judge
                    rubric.class_objects["judge_client"] = judge
        self.rows = {"train": self.env.build_dataset(), "heldout": self.env.build_eval_dataset()}
        if None in self.rows.values():
            only = next(rows for rows in self.rows.values() if rows is not None)
            self.rows = {key: only.select(held_out(len(only), key)) for key in self.rows}

    def tasks(self, split: str) -> list[dict[str, Json]]:
        questions = [digest(row.get("prompt", row.get("question"))) for row in self.rows[split]]
        return [
            {"id": f"{self.what}/{split}/{i}", "input": [split, i], "question": question}
            for i, question in enumerate(questions)
        ]

    def solution(self, at: list[Any]) -> list[str] | None:
        kinds = {class_.__name__ for class_ in (*type(self.env).__mro__, type(self.env.parser))}
        answer = self.rows[at[0]][at[1]].get("answer")
        return [answer] if answer and kinds >= {"SingleTurnEnv", "Parser"} else None

    async def run(self, at: list[Any], endpoint: Endpoint) -> dict[str, float]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        both = (endpoint, *map(endpoint.role, self.roles))
        clients = [AsyncOpenAI(base_url=target.url, api_key=target.key) for target in both]
        judge.set_instance(clients[-1])
        row, client = dict(self.rows[at[0]][at[1]]), OpenAIChatCompletionsClient(clients[0])
        client.raise_from_native_response = accept
        async with clients[0], clients[-1]:
            state = await self.env._run_rollout_state(row, client, endpoint.model, {})
        if (error := state["error"]) is not None and "Tool" not in type(error).__name__:
            raise RuntimeError(repr(error)) from error
        return {**(state["metrics"] or {}), "outcome": state["reward"]}


async def accept(response: Any) -> None: ...  # an empty answer is wrong, but not an error


class Loud(logging.LoggerAdapter):  # type: ignore[type-arg]
    def error(self, message: object, *_: Any, **__: Any) -> None:  # type: ignore[override]
        raise RuntimeError(message)  # error of a reward function; verifiers would score 0


def noted(add: Any) -> Any:
    async def call(state: Any, step: Any) -> None:
        await add(state, step)
        if step["reward"] is not None:
            reward(step["reward"], "step")

    return call


class VerifiersV1(Environment):
    """verifiers from 0.4: tasksets of `verifiers.v1`. WHAT is a taskset, installed or beside the
    run file; `harness` is the program that plays."""

    requires = ("verifiers==0.4.0", "uv==0.13.9")

    def __init__(
        self, what: str, take: int = 500, harness: str = "null", max_turns: int = 50, **config: Any
    ) -> None:
        """`take`: maximum number of tasks, because a taskset may be infinite. `max_turns`: maximum
        calls of a rollout, because a harness repeats a tool call that it cannot parse. `config`:
        arguments of the taskset."""
        # The package calls uv.
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        sys.path.insert(0, str(self.root))
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        agent = {"harness": {"id": harness}, "max_turns": max_turns}
        agent |= {"runtime": {"type": "subprocess"}}
        resolved = resolve_env_config({"taskset": {"id": what, **config}, "agent": agent})
        self.env, self.what = load_environment(resolved), what
        self.tasks_by_key = {task.key: task for task in self.env.taskset.take(take)}
        self.ready: asyncio.Future[None] | None = None

    def tasks(self, split: str) -> Iterator[dict[str, Json]]:
        keys = [*self.tasks_by_key]
        for key in (keys[i] for i in held_out(len(keys), split)):
            yield {"id": f"{self.what}/{key}", "input": key}

    def solution(self, key: str) -> list[str] | None:
        answer = getattr(self.tasks_by_key[key].data, "answer", None)
        return [answer] if isinstance(answer, str) else None

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """One server for all rollouts of this process. A model call is recorded in its rollout,
        because it uses the rollout's address."""
        try:
            async with self.env.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - the rollouts raise it
            ready.set_exception(error)

    async def run(self, key: str, endpoint: Endpoint) -> dict[str, float]:
        import verifiers.v1 as vf

        if self.ready is None:
            self.ready = asyncio.get_running_loop().create_future()
            self.task = asyncio.create_task(self._serve(self.ready))
        await asyncio.shield(self.ready)
        client = vf.EvalClientConfig(base_url=endpoint.url, api_key_var="OPENAI_API_KEY")
        model = vf.ModelContext(model=endpoint.model, client=client, sampling=vf.SamplingConfig())
        [slot] = self.env.slots(self.tasks_by_key[key], 1)
        return scores_of_episode(await self.env.run_slot(slot, model, None, None))
