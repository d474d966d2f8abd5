"""verifiers from 0.4: tasksets of `verifiers.v1`. WHAT is a taskset, installed or beside the run
file; `harness` is the program that plays."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.environments import Endpoint, Environment
from agentrl.environments.plugins.shared import held_out
from agentrl.environments.plugins.verdicts import scores_of_episode
from agentrl.types import Json


class VerifiersV1(Environment):
    requires = ("verifiers==0.4.0", "uv==0.13.9")

    def __init__(
        self, what: str, take: int = 500, harness: str = "null", max_turns: int = 50, **config: Any
    ) -> None:
        """`take`: most tasks, of a taskset that may have no end. `max_turns`: most calls of a
        rollout, since a harness repeats a tool call that it cannot read. `config`: of the
        taskset."""
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it calls uv
        sys.path.insert(0, str(self.root))
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        agent = {"harness": {"id": harness}, "max_turns": max_turns}
        agent |= {"runtime": {"type": "subprocess"}}
        known = resolve_env_config({"taskset": {"id": what, **config}, "agent": agent})
        self.env, self.what = load_environment(known), what
        self.known = {task.key: task for task in self.env.taskset.take(take)}
        self.ready: asyncio.Future[None] | None = None

    def tasks(self, split: str) -> Iterator[dict[str, Json]]:
        keys = [*self.known]
        for key in (keys[i] for i in held_out(len(keys), split)):
            yield {"id": f"{self.what}/{key}", "input": key}

    def solution(self, key: str) -> list[str] | None:
        answer = getattr(self.known[key].data, "answer", None)
        return [answer] if isinstance(answer, str) else None

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """One server for all rollouts of this process. A model call goes to its own rollout,
        because its address is the rollout's."""
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
        [slot] = self.env.slots(self.known[key], 1)
        return scores_of_episode(await self.env.run_slot(slot, model, None, None))
