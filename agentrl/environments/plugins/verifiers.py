"""verifiers up to 0.3. WHAT is a module with `load_environment`; a judge is the role `judge`."""

from __future__ import annotations

import logging
import sys
from typing import Any

from agentrl import reward
from agentrl.environments import Endpoint, Environment
from agentrl.environments.plugins.shared import OfThisRollout, held_out, some_key
from agentrl.types import Json

judge: Any = OfThisRollout()


class Verifiers(Environment):
    requires = ("verifiers==0.3.1",)

    def __init__(self, what: str, **arguments: Any) -> None:
        sys.path.insert(0, str(self.root))
        with some_key():
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
        rows = range(len(self.rows[split]))
        return [{"id": f"{self.what}/{split}/{i}", "input": [split, i]} for i in rows]

    def solution(self, at: list[Any]) -> list[str] | None:
        kinds = {one.__name__ for one in (*type(self.env).__mro__, type(self.env.parser))}
        answer = self.rows[at[0]][at[1]].get("answer")
        return [answer] if answer and kinds >= {"SingleTurnEnv", "Parser"} else None

    async def run(self, at: list[Any], endpoint: Endpoint) -> dict[str, float]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        both = (endpoint, *map(endpoint.role, self.roles))
        clients = [AsyncOpenAI(base_url=one.url, api_key=one.key) for one in both]
        judge.set_own(clients[-1])
        row, client = dict(self.rows[at[0]][at[1]]), OpenAIChatCompletionsClient(clients[0])
        client.raise_from_native_response = accept
        async with clients[0], clients[-1]:
            state = await self.env._run_rollout_state(row, client, endpoint.model, {})
        if (error := state["error"]) is not None and "Tool" not in type(error).__name__:
            raise RuntimeError(repr(error)) from error
        return {**(state["metrics"] or {}), "outcome": state["reward"]}


async def accept(response: Any) -> None: ...  # an empty answer is a wrong one, and no error


class Loud(logging.LoggerAdapter):  # type: ignore[type-arg]
    def error(self, message: object, *_: Any, **__: Any) -> None:  # type: ignore[override]
        raise RuntimeError(message)  # of a reward function, which would score 0


def noted(add: Any) -> Any:
    async def call(state: Any, step: Any) -> None:
        await add(state, step)
        if step["reward"] is not None:
            reward(step["reward"], "step")

    return call
