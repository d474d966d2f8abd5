"""Prompts of the agent in a run: the texts of each step, and searches for better ones before or
between steps. The store keeps a search's rollouts and calls to the reflector. Invariant: the ids of
evaluations and reflections are their numbers in the search, so a restarted search repeats its start
and finds the results in the store. A step of the run is an iteration of the search, or with
training a complete search.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import count, takewhile
from statistics import fmean
from typing import Any, TypeVar

import aiohttp
from msgspec.structs import replace

from agentrl.algorithms.chat_completions import complete, find_endpoint
from agentrl.algorithms.prompt_search import (
    Candidate,
    Reflection,
    Search,
    SearchEnd,
    TaskResult,
    add_reflection,
    answers,
    candidate_id,
    found_texts,
    prompt_texts,
    put_candidates,
    reflections_of,
)
from agentrl.algorithms.sampling.evaluate import MAX_TRIALS, all_failed, play
from agentrl.algorithms.sampling.tasks import URGENT, CandidateInUse, new_rollout
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import has_no_own_policy
from agentrl.core.config.run_file import tasks_of
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.processes import log_phase, log_to_stderr
from agentrl.core.types import (
    ENDED,
    NewRollout,
    PromptText,
    Purpose,
    Rollout,
    RunState,
    StepCommit,
    Task,
    Trace,
)
from agentrl.store import open_store, run_folder
from agentrl.store.base import Store

log = logging.getLogger("agentrl.algorithm")

T = TypeVar("T")
MAX_MESSAGE_CHARS = 2000  # characters of a message in an example


class StoredBackend:
    """Runs the calls of a search, which runs in a separate thread, on the store's event loop.
    commits: whether each iteration is a step of the run."""

    def __init__(
        self, store: Store, config: RunConfig, state: RunState, tasks: list[Task], step: int | None
    ) -> None:
        self.store, self.config, self.state, self.tasks = store, config, state, tasks
        self.settings = config.prompts
        self.commits, self.step = step is None, step or 0
        self.name = f"{config.name}/prompts/{self.step:06d}"
        self.metrics: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        self._evaluations = count()
        self._reflections: dict[str, Reflection] = {}
        self._started = time.monotonic()
        self._scored = False  # whether there has been a rollout with a reward

    async def load(self) -> None:
        """Read the reflections from before a restart, and skip evaluations of the seed texts that
        ended the run because every rollout failed."""
        rows = await self.store.groups(self.config.name, step=self.step, limit=MAX_TRIALS)
        evaluations = sorted(
            (row for row in rows if row.id.startswith(self.name)), key=lambda row: row.id
        )
        self._evaluations = count(len([*takewhile(all_failed, evaluations)]))
        self._reflections = {
            reflection.id: reflection
            for reflection in await reflections_of(self.store, self.config.name)
        }

    def play(
        self, batches: Sequence[tuple[Candidate, Sequence[int]]], *, traces: bool
    ) -> list[list[TaskResult]]:
        return self._do(self._play(batches, traces))

    def ask(self, number: int, question: str) -> Reflection:
        return self._do(self._ask(f"{self.name}/{number:05d}", question))

    def put(self, candidates: Sequence[Candidate]) -> None:
        self._do(put_candidates(self.store, self.config.name, candidates))

    def end_iteration(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics
        if not self.commits:
            return
        now = time.monotonic()
        timed = metrics | {"time/step": now - self._started}
        if self.step >= self.state.step:
            finite = {name: value for name, value in timed.items() if not math.isnan(value)}
            run, epoch = self.config.name, self.state.epoch
            nothing: Any = {"groups": [], "versions": {}, "checkpoint": None}
            commit = StepCommit(run=run, epoch=epoch, step=self.step, metrics=finite, **nothing)
            self._do(self.store.commit_step(commit))
        self.step, self._started = self.step + 1, now

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _play(
        self, batches: Sequence[tuple[Candidate, Sequence[int]]], traces: bool
    ) -> list[list[TaskResult]]:
        groups = [f"{self.name}/{next(self._evaluations):05d}.{c.id}" for c, _ in batches]
        requested: list[NewRollout] = []
        for group, (candidate, tasks) in zip(groups, batches, strict=True):
            chosen_tasks = [self.tasks[i] for i in tasks]
            requested += candidate_rollouts(
                self.config, group, chosen_tasks, candidate.id, self.step
            )
        await self.store.enqueue(requested)
        for group in groups:
            await self.store.settled(group)
        results: list[list[TaskResult]] = []
        for group, (candidate, _) in zip(groups, batches, strict=True):
            rows = await self.store.rollouts(self.config.name, group=group)
            shown = [await self._examples(row, candidate.texts) if traces else {} for row in rows]
            failures = [row.failure.message if row.failure else "" for row in rows]
            results.append(list(map(TaskResult, (row.reward() for row in rows), shown, failures)))
        return results

    async def _examples(
        self, rollout: Rollout, texts: Sequence[PromptText]
    ) -> dict[str, dict[str, str]]:
        trace = await self.store.trace(rollout.id)
        if (
            rollout.rewards
            and not self._scored
            and not any(reward.note for reward in rollout.rewards)
        ):
            log.warning("the verifier gives no reasons (Reward.note): the reflector sees numbers")
        self._scored = self._scored or bool(rollout.rewards)
        examples = {} if trace is None else {t.component: example_of(trace, t) for t in texts}
        return {name: example for name, example in examples.items() if example}

    async def _ask(self, id: str, question: str) -> Reflection:
        if id in self._reflections:
            if self._reflections[id].question != question:
                raise AgentRLError(
                    f"reflection {id} was asked something else before: settings, tasks or the "
                    "version of gepa have changed; restore them, or start again with --fresh"
                )
            return self._reflections[id]
        started = time.monotonic()
        who = self.settings.reflector
        endpoint = await find_endpoint(self.store, self.config, who)
        async with aiohttp.ClientSession() as session:
            answer = await complete(session, endpoint, question, f"prompts.reflector {who}")
        reflection = Reflection(
            id=id,
            run=self.config.name,
            step=self.step,
            question=question,
            answer=answer.text,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            seconds=time.monotonic() - started,
        )
        await add_reflection(self.store, reflection)
        return reflection


def candidate_rollouts(
    config: RunConfig, group: str, tasks: Sequence[Task], candidate: str, step: int
) -> list[NewRollout]:
    """One rollout per task, sampled as in evaluations."""
    sampling = replace(config.sampling, temperature=config.eval.temperature)
    rows = (new_rollout(config, group, n, task, step, sampling) for n, task in enumerate(tasks))
    fields = {"purpose": Purpose.EVAL, "priority": URGENT, "candidate": candidate}
    return [replace(row, **fields) for row in rows]


def example_of(trace: Trace, text: PromptText) -> dict[str, str]:
    """The last call whose prompt contains a component, with rewards and failures; empty if there is
    none."""
    # A prompt that was sent as token ids has no messages, so its components are unknown.
    calls = [call for call in trace.transitions if call.role == text.role and call.messages]
    if text.tool:
        calls = [call for call in calls if text.tool in map(_name, call.tools)]
    if not calls:
        return {}
    last = calls[-1]
    answer = last.answer or {}
    answered = answer.get("content") or json.dumps(answer.get("tool_calls"), ensure_ascii=False)
    feedback = [
        f"{reward.name} = {reward.value:g}" + (f": {reward.note}" if reward.note else "")
        for reward in trace.rollout.rewards
        if reward.target in (None, text.role, *(call.id for call in calls))
    ]
    failure = trace.rollout.failure
    feedback += [f"{failure.kind.value}: {failure.message}"] if failure else []
    feedback += [f"{span.name} failed" for span in trace.spans if not span.ok]
    read = json.dumps(last.messages[-1].get("content"), ensure_ascii=False)
    return {
        "Read": read[:MAX_MESSAGE_CHARS],
        "Said": str(answered)[:MAX_MESSAGE_CHARS],
        "Feedback": "; ".join(feedback),
    }


def _name(tool: Mapping[str, Any]) -> str:
    return str((tool.get("function") or {}).get("name"))


async def search_prompts(
    store: Store, config: RunConfig, state: RunState, texts: list[PromptText], step: int | None
) -> Candidate:
    """Search from `texts`; returns the best candidate. step: the training step that the search
    belongs to; None: the iterations of the search are the steps of the run."""
    train = tasks_of(config, "train")
    heldout = tasks_of(config, "heldout")
    settings = config.prompts
    if len(train) <= settings.validation:
        raise ConfigError(
            f"prompts.validation = {settings.validation} takes all of the {len(train)} tasks "
            "of tasks.train; lower it, or add tasks"
        )
    backend = StoredBackend(store, config, state, list(train), step)
    await backend.load()
    search = Search(
        settings,
        texts,
        backend,
        len(train),
        run=config.name,
        step=step or 0,
        random_seed=config.seed,
        answers=answers(train, heldout),
    )
    log_phase(log, f"searching prompts ({settings.algorithm}, {len(texts)} texts)")
    await asyncio.to_thread(_run, search)
    best = replace(search.best, state="chosen")
    await put_candidates(store, config.name, [best])
    if step is not None:
        await store.log(config.name, step, backend.metrics, epoch=state.epoch)
    return best


def _run(search: Search) -> None:
    algorithm: Callable[[Search], None]
    if search.config.algorithm == "gepa":
        from agentrl.algorithms.gepa_search import gepa_search as algorithm
    else:
        from agentrl.algorithms.prompt_search import apo_search as algorithm
    try:
        algorithm(search)
    except SearchEnd as end:
        log_phase(log, f"the search ends after {search.rollouts} rollouts: {end}")
    search.end_iteration()


async def play_heldout(
    store: Store, config: RunConfig, state: RunState, candidates: Mapping[str, str], step: int
) -> None:
    """Score candidates on the held-out tasks. candidates: metric name -> candidate id."""
    tasks = tasks_of(config, "heldout")
    tasks = tasks[: config.eval.tasks or None]
    group = f"{config.name}/prompts/heldout"
    requested = {
        name: candidate_rollouts(config, f"{group}/{id}", tasks, id, step)
        for name, id in candidates.items()
    }
    for name, rows in (await play(store, requested)).items():
        scored = [row.reward() for row in rows if not math.isnan(row.reward())]
        values = {f"{name}_missing": float(len(rows) - len(scored))}
        values |= {name: fmean(scored)} if scored else {}
        await store.log(config.name, step, values, epoch=state.epoch)


def main(config: RunConfig) -> None:
    log_to_stderr()
    asyncio.run(
        search_upstreams(config) if has_no_own_policy(config) else _search_with_policies(config)
    )


async def _search_with_policies(config: RunConfig) -> None:
    """Search with the run's policies, which do not learn."""
    from agentrl.algorithms.train.stages import served

    async with served(config, 0) as (store, state):
        await search_and_score(store, config, state)


async def search_upstreams(config: RunConfig) -> None:
    """Search for a run that only calls `[upstreams]`."""
    async with open_store(config.store) as store:
        state = await run_folder.open_as_child(store, config)
        await search_and_score(store, config, state)


async def search_and_score(store: Store, config: RunConfig, state: RunState) -> None:
    """Search for better prompts, then score the result and the agent's original texts on the
    held-out tasks."""
    texts = prompt_texts(config)
    best = await search_prompts(store, config, state, texts, None)
    step = len([row for row in await store.steps(config.name) if row.committed])
    scored = {"prompts/heldout_before": candidate_id(texts), "prompts/heldout": best.id}
    await play_heldout(store, config, state, scored, step)
    await store.log(config.name, 0, {ENDED: 1.0}, epoch=state.epoch)


class PromptSchedule:
    """Sets the prompts of each step. The store keeps results of earlier searches, so a restart
    repeats them quickly, and a repeated step has the same prompts."""

    def __init__(
        self, store: Store, config: RunConfig, state: RunState, in_use: CandidateInUse | None = None
    ) -> None:
        """in_use: the holder that the schedule updates; default: a new one."""
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
        original = Candidate(id=id, run=name, step=0, parents=[], state="accepted", texts=texts)
        await self._use(original)
        for step in range(self._state.step):
            await self.before_step(step)

    async def before_step(self, step: int) -> None:
        """If a search is due, run it from the prompts in use, with the current policies."""
        prompts = self._config.prompts
        schedule = prompts.schedule
        interval = schedule if isinstance(schedule, int) else max(1, self._config.steps)
        if not prompts.components or schedule == "off" or step % interval:
            return

        config = self._config
        for row in await self._store.steps(config.name, after=step - 1, limit=1):
            if row.step == step and "prompts/rollouts" in row.metrics:  # this search has ended
                spent = int(row.metrics["prompts/rollouts"])
                limits: Any = {"prompts": replace(prompts, budget=spent)}
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


class PromptSearch(Feature):
    """Sets the prompts of each step."""

    schedule: PromptSchedule

    async def start(self, run: ServedRun) -> None:
        self.schedule = PromptSchedule(run.store, run.config, run.state, run.candidate)
        await self.schedule.start()

    async def before_step(self, step: int) -> None:
        await self.schedule.before_step(step)
