"""The prompts that a run uses at each step, and the steps at which it searches for better ones."""

from __future__ import annotations

import logging
from typing import Any

from msgspec.structs import replace

from agentrl.algorithms.prompts.records import Candidate, put_candidates
from agentrl.algorithms.prompts.search import candidate_id
from agentrl.algorithms.prompts.texts import found_texts, prompt_texts
from agentrl.algorithms.sampling.rollouts import CandidateInUse
from agentrl.base.processes import log_phase
from agentrl.config import RunConfig
from agentrl.store.base import Store
from agentrl.types import PromptText, RunState

log = logging.getLogger("agentrl.algorithm")


class PromptSchedule:
    """Sets the prompts of each step. The store has the results of earlier searches, so a restart
    repeats them quickly and every start of a step has the same prompts."""

    def __init__(
        self, store: Store, config: RunConfig, state: RunState, in_use: CandidateInUse | None = None
    ) -> None:
        """in_use: what the schedule sets; default: its own."""
        self.in_use = CandidateInUse() if in_use is None else in_use
        self._store, self._config, self._state = store, config, state
        self._texts: list[PromptText] = []

    async def start(self) -> None:
        """Set the prompts of the next step, without a search that is due before it."""
        prompts = self._config.prompts
        if not prompts.components:
            return
        directory = None if prompts.schedule != "off" else found_texts(self._config)
        texts = prompt_texts(self._config, directory)
        log_phase(log, f"prompts: {directory or 'the agent has its own texts'}")
        id, name = candidate_id(texts), self._config.name
        own = Candidate(id=id, run=name, step=0, parents=[], state="accepted", texts=texts)
        await self._use(own)
        for step in range(self._state.step):
            await self.before_step(step)

    async def before_step(self, step: int) -> None:
        """If a search is due, run it from the prompts in use, with the current policies."""
        prompts = self._config.prompts
        every = prompts.every if prompts.schedule == "alternate" else max(1, self._config.steps)
        if not prompts.components or prompts.schedule == "off" or step % every:
            return
        from agentrl.algorithms.prompts.stored import search_prompts

        config = self._config
        for row in await self._store.steps(config.name, after=step - 1, limit=1):
            if row.step == step and "prompts/rollouts" in row.metrics:  # this search has ended
                spent = int(row.metrics["prompts/rollouts"])
                limits: Any = {"prompts": replace(prompts, budget=spent, max_seconds=0.0)}
                config = replace(config, **limits)
        await self._use(await search_prompts(self._store, config, self._state, self._texts, step))

    async def _use(self, candidate: Candidate) -> None:
        await put_candidates(self._store, self._config.name, [candidate])
        self._texts, self.in_use.id = candidate.texts, candidate.id


async def candidate_in_use(store: Store, config: RunConfig, state: RunState) -> str | None:
    """The id of the texts that an evaluation without policies uses."""
    schedule = PromptSchedule(store, config, state)
    await schedule.start()
    return schedule.in_use.id
