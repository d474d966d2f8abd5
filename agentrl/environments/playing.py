"""Plays rollouts of an environment, and checks what its plug-in returns: whatever is wrong with it
is one sentence with the environment's name, and the rollout has failed."""

from __future__ import annotations

import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import msgspec

from agentrl.base import user_code
from agentrl.environments.base import Environment, Episode, EpisodeError, Message, Said, Scores
from agentrl.environments.endpoints import Endpoint
from agentrl.errors import AgentError, Invalid, PolicyError
from agentrl.runners.scoring.rewards import PENDING, SOURCE
from agentrl.runners.scoring.verifiers import VerifierError, as_number, as_rewards
from agentrl.runners.tracing import attempt_log
from agentrl.store.limits import check_reward
from agentrl.types import Json, Reward, Scope, Transition

OUTCOME = "outcome"
STEP = "step"  # name of the reward of a step, on its call
AGENT = "agent"  # the role of the policy that plays, by default


async def play_task(environment: Environment, name: str, given: Json, endpoint: Endpoint) -> Any:
    """Play one task; return {"environment": `name`, "rewards": rows} or, of an environment that
    only verifies, the text of one model call."""
    endpoint = replace(endpoint, others=tuple(environment.roles))
    run: Any = getattr(environment, "run", None)
    if run is not None:
        scores = await called(name, "run", run, given, endpoint)
        return result(name, scores_of(scores, name))
    if (begin := getattr(environment, "open", None)) is not None:
        episode = await _opened(begin, given, name)
        rows = await play(episode, endpoint, environment.limit, name)
        return result(name, rows)
    reply = await endpoint.chat(_messages(given, name, "its input"))
    return reply["content"]


async def _opened(begin: Callable[[Any], Any], given: Json, name: str) -> Any:
    """The episode of an input. One that is made after its rollout has ended is closed."""
    over = threading.Event()

    def opened(given: Json) -> Any:
        episode = begin(given)
        if over.is_set():
            episode.close()
        return episode

    try:
        return await called(
            name, "open", begin if inspect.iscoroutinefunction(begin) else opened, given
        )
    except BaseException:
        over.set()
        raise


def result(name: str, rows: list[Reward]) -> dict[str, Json]:
    return {"environment": name, "rewards": msgspec.to_builtins(rows)}


async def play(
    episode: Episode, endpoint: Endpoint, limit: int = 50, name: str = "environment"
) -> list[Reward]:
    """Play an episode to its end and return its scores, of roles only if none is the agent. The
    reward of each step is recorded for the call that it is about.

    Raises EpisodeError for whatever the environment does wrong, an episode of more than `limit`
    turns too, and PolicyError if a model call fails."""
    if not callable(getattr(episode, "step", None)):
        raise EpisodeError(f"{name}: open returned {episode!r:.80}, which is no Episode")
    turns = Turns(name)
    try:
        said = await called(name, "reset", turns.closing_late(episode, episode.reset))
        while not turns.done:
            if turns.count >= limit:
                raise EpisodeError(
                    f"{name}: an episode had not ended after {limit} turns; let step end it, with"
                    " the reward of one that was cut short, or give the environment a higher limit"
                )
            said = await _turn(episode, endpoint, turns, said)
        scores = await called(name, "rewards", episode.rewards)
        rows = turns.outcome() if scores is None else scores_of(scores, name)
    except BaseException:
        turns.over.set()
        with suppress(EpisodeError):  # the first error is the cause
            await called(name, "close", episode.close)
        raise
    given = _rewards_so_far()
    await called(name, "close", episode.close)
    if _rewards_so_far() > given:
        raise EpisodeError(f"{name}: close gave a reward, after the end; give it in step")
    return rows


async def _turn(episode: Episode, endpoint: Endpoint, turns: Turns, said: Said) -> Said:
    who = episode.role
    talk = turns.talks[who] if episode.keep else list[Message]()
    talk += _messages(said, turns.name, "what an episode says")
    model = endpoint if who == AGENT else await called(turns.name, "role", endpoint.role, who)
    reply = await model.chat(talk, episode.tools)
    talk.append(reply)
    turns.calls[who] = _latest_call()
    step = await called(turns.name, "step", turns.closing_late(episode, episode.step), reply)
    if not isinstance(step, tuple | list) or len(step) != 3:
        raise EpisodeError(
            f"{turns.name}: step returned {step!r:.80}; return what is said next, the reward or"
            " None, and whether the episode has ended"
        )
    said, reward, done = step
    if done is None or isinstance(done, str | bytes):
        what = f"step returned {done!r:.80} as whether the episode has ended; return True or False"
        raise EpisodeError(f"{turns.name}: {what}")
    turns.count, turns.done = turns.count + 1, bool(done)
    if reward is not None:
        rewards = reward if isinstance(reward, dict) else {who: reward}
        for role, value in rewards.items():
            turns.record(role, value)
    return said


@dataclass
class Turns:
    """What has happened in an episode."""

    name: str
    talks: dict[str, list[Message]] = field(default_factory=lambda: defaultdict(list))  # by role
    calls: dict[str, str] = field(default_factory=dict)  # latest one by role: ids at this tracer
    totals: dict[str, float] = field(default_factory=dict)  # of the steps' rewards, by role
    count: int = 0
    done: bool = False
    over: threading.Event = field(default_factory=threading.Event)  # no method is awaited any more

    def closing_late(self, episode: Episode, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of an episode that closes the episode again if it ends after the rollout, whose
        end has closed only what was open by then: a thread cannot be cancelled."""
        if inspect.iscoroutinefunction(method):
            return method

        def run(*given: Any) -> Any:
            try:
                return method(*given)
            finally:
                if self.over.is_set():
                    episode.close()

        return run

    def record(self, who: str, reward: Any) -> None:
        """Store the reward of a step for the latest call of this role."""
        about = self.calls.get(who, "")
        try:
            value = as_number(reward)
        except ValueError:
            raise EpisodeError(f"{self.name}: step gave the reward {reward!r:.80}") from None
        self._check(value, f"step gave the reward {value:g}")
        self.totals[who] = self.totals.get(who, 0.0) + value
        if (log := attempt_log.current()) is not None and about:
            row = Reward(value, STEP, Scope.TRANSITION, f"{PENDING}{about}", SOURCE)
            log.rewards.append(row)

    def outcome(self) -> list[Reward]:
        """The sum of the steps' rewards, and of each role if it is not the agent alone."""
        if not self.totals:
            raise EpisodeError(
                f"{self.name}: an episode ended without a reward; give one in step or in rewards"
            )
        whole = [Reward(self.totals[AGENT])] if AGENT in self.totals else []
        if {*self.totals} == {AGENT}:
            return whole
        by_role = self.totals.items()
        return [*whole, *(Reward(sum_, scope=Scope.ROLE, target=role) for role, sum_ in by_role)]

    def _check(self, value: float, what: str) -> None:
        try:
            check_reward(Reward(value), self.name)
        except Invalid:
            number = "a finite" if not math.isfinite(value) else "a smaller"
            raise EpisodeError(f"{self.name}: {what}; return {number} number or None") from None


def with_outcome(rows: list[Reward], calls: Iterable[Transition]) -> list[Reward]:
    """Scores of roles only, and with them the rollout's: the mean of the roles in which a policy
    learns, or of all. Endpoints do not learn, nor earlier versions, whose names have an "@"."""
    outcomes = [row for row in rows if row.name == OUTCOME and row.scope is not Scope.TRANSITION]
    found = {row.target: row.value for row in outcomes if row.scope is Scope.ROLE}
    if len(found) < len(outcomes):
        return rows
    learn = {call.role for call in calls if call.version is not None and "@" not in call.policy}
    own = [value for role, value in found.items() if role in learn] or [*found.values()]
    return [Reward(fmean(own)), *rows] if own else rows


def scores_of(returned: Scores | None, name: str) -> list[Reward]:
    """What an environment returned as rows. Raises EpisodeError for anything but rewards."""
    try:
        if returned is None:
            raise VerifierError("the verifier returned no reward; return a number, or a mapping")
        rows = as_rewards(returned)
        for row in rows:
            check_reward(row, name)
    except VerifierError as error:
        why = str(error).replace("the verifier returned", "it returned")
        raise EpisodeError(f"{name}: {why}") from None
    except Invalid as error:
        raise EpisodeError(f"{name}: {error}") from None
    if not any(row.name == OUTCOME and row.scope is not Scope.TRANSITION for row in rows):
        names = ", ".join(sorted({row.name for row in rows}))
        raise EpisodeError(f"{name}: it returned no {OUTCOME!r}, only {names}")
    return rows


async def called(name: str, what: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call what a plug-in has written: in a thread, unless it is async."""
    try:
        if inspect.iscoroutinefunction(function):
            return await user_code.awaited(function(*given))
        returned = await user_code.in_thread(_inside, function, *given)
        return await user_code.awaited(returned) if inspect.isawaitable(returned) else returned
    except (EpisodeError, PolicyError):
        raise
    except AgentError as error:
        raise EpisodeError(f"{name}: {error}") from error
    except Exception as error:  # a plug-in may raise anything
        raise EpisodeError(f"{name}: {what} raised {user_code.text_of(error)}") from error


def _inside(function: Callable[..., Any], *given: Any) -> Any:
    attempt_log.enter_agent()
    return function(*given)


def _latest_call() -> str:
    log = attempt_log.current()
    return "" if log is None else " ".join(call.id for call in log.latest())


def _rewards_so_far() -> int:
    log = attempt_log.current()
    return 0 if log is None else len(log.rewards)


def _messages(said: Any, name: str, what: str) -> list[Message]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if isinstance(said, list) and all(isinstance(one, dict) and "role" in one for one in said):
        return said
    raise EpisodeError(f"{name}: {what} is {said!r:.80}; make it a text or a list of messages")
