"""Plays environments and checks their results. An invalid result of a plug-in fails the rollout,
with a one-sentence message that names the environment. `endpoint()` is the model API of the rollout
in which code runs, for clients that cannot find it themselves.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import httpx
import msgspec

from agentrl.core import user_code
from agentrl.core.errors import AgentError, Invalid, PolicyError
from agentrl.core.types import Json, Reward, Scope, Transition
from agentrl.environments.base import (
    Environment,
    Episode,
    EpisodeError,
    Message,
    Observation,
    Scores,
)
from agentrl.runners.scoring import PENDING, SOURCE, VerifierError, as_number, as_rewards
from agentrl.runners.tracing import attempt_log
from agentrl.store.rows import check_reward

TRACE = re.compile("00-([0-9a-f]{32})-")  # format of TRACEPARENT in an agent's own process


OUTSIDE = (
    "agentrl.endpoint() is of the rollout in which it is called, and this is none: call it inside"
    " the agent (not when its module is imported, and not in a server or thread that outlives a"
    " rollout), and pass its url and key on"
)


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible API that belongs to one attempt: calls through it are recorded in this
    attempt from any client, thread, server or other process, while the attempt runs."""

    url: str  # ends in /v1
    key: str
    model: str = "policy"
    others: tuple[str, ...] | None = None  # allowed roles besides the policy's; None: any

    def role(self, name: str) -> Endpoint:
        """The endpoint whose calls have the role `name`, such as "user" or "judge"."""
        if not name:
            raise ValueError("a role needs a name")
        if self.others is not None and name not in (attempt_log.DEFAULT, *self.others):
            raise AgentError(
                f"the environment asks models in the role {name!r}, which its `roles` do not name,"
                " so the run file could not say who answers; add it there"
            )
        start = re.sub(r"(/a/[^/]+)(/[^/]+)?/v1$", r"\1", self.url)
        return replace(self, url=f"{start}/{quote(name, safe='')}/v1")

    async def chat(
        self, messages: list[dict[str, Any]], tools: Any = None, **sampling: Any
    ) -> dict[str, Any]:
        """The assistant's message. sampling: more of the request's body. Raises PolicyError."""
        loop = asyncio.get_running_loop()
        if (client := _clients.get(loop)) is None:
            client = _clients[loop] = httpx.AsyncClient(**_settings())
        try:
            return _read(await client.post(**self._request(messages, tools, sampling)))
        except httpx.HTTPError as error:
            raise _unreachable(error) from error

    def chat_sync(
        self, messages: list[dict[str, Any]], tools: Any = None, **sampling: Any
    ) -> dict[str, Any]:
        """`chat` for code that is not async."""
        try:
            return _read(_client().post(**self._request(messages, tools, sampling)))
        except httpx.HTTPError as error:
            raise _unreachable(error) from error

    def _request(self, messages: Any, tools: Any, sampling: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, **sampling}
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        content = msgspec.json.encode(body | ({"tools": tools} if tools else {}))
        return {"url": f"{self.url}/chat/completions", "content": content, "headers": headers}


def endpoint() -> Endpoint:
    """The endpoint of the rollout in which this is called. Raises AgentError outside of rollouts.

    In another program that a rollout starts, use the url and key, which it must be given; an
    `agent.command` and its Python children find them by this function too."""
    url, key = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")
    start = re.sub(r"(/a/[^/]+(/[^/]+)?)?(/v1)?/?$", "", url)
    log = attempt_log.current()
    attempt = _own_process(start) if log is None else log.attempt
    if not (url and attempt):
        raise AgentError(OUTSIDE)
    return Endpoint(f"{start}/a/{attempt}/v1", key)


def _own_process(gateway: str) -> str:
    """The attempt in whose process an `agent.command` runs; all of its variables must belong to one
    gateway."""
    trace = TRACE.match(os.environ.get("TRACEPARENT", ""))
    ours = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") == gateway
    return trace[1] if trace and ours else ""


def _settings() -> dict[str, Any]:
    # The attempt's deadline ends calls. No proxy is between agent and gateway. Connections are not
    # kept, as they could not be closed after their event loop has ended.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return {"timeout": None, "trust_env": False, "limits": limits}


@cache
def _client() -> httpx.Client:
    return httpx.Client(**_settings())


def _read(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise PolicyError(f"a model call failed: {answer.status_code}, {_words(answer)}")
    try:
        message = msgspec.json.decode(answer.content)["choices"][0]["message"]
        fields = {key: value for key, value in message.items() if value is not None}
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        raise PolicyError(f"a model call had no message as answer: {answer.text:.300}") from None
    return {"role": "assistant", "content": "", **fields}


def _words(answer: httpx.Response) -> str:
    """The text of an error: its message field, if it has the format of OpenAI's API."""
    try:
        return str(msgspec.json.decode(answer.content)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return f"{answer.text:.300}"


def _unreachable(error: httpx.HTTPError) -> PolicyError:
    return PolicyError(f"a model call failed: {type(error).__name__}: {error}")


OUTCOME = "outcome"


STEP = "step"  # name of the reward of a step, on its call


AGENT = "agent"  # the role of the policy that plays, by default


async def play_task(
    environment: Environment, name: str, task_input: Json, endpoint: Endpoint
) -> Any:
    """Play one task; return {"environment": `name`, "rewards": rows} or, of an environment that
    only verifies, the text of one model call."""
    endpoint = replace(endpoint, others=tuple(environment.roles))
    run: Any = getattr(environment, "run", None)
    if run is not None:
        scores = await called(name, "run", run, task_input, endpoint)
        return result(name, scores_of(scores, name))
    if (begin := getattr(environment, "open", None)) is not None:
        episode = await _opened(begin, task_input, name)
        rows = await play(episode, endpoint, environment.limit, name)
        return result(name, rows)
    reply = await endpoint.chat(_messages(task_input, name, "its input"))
    return reply["content"]


async def _opened(begin: Callable[[Any], Any], task_input: Json, name: str) -> Any:
    """The episode of an input. One that is made after its rollout has ended is closed."""
    over = threading.Event()

    def opened(task_input: Json) -> Any:
        episode = begin(task_input)
        if over.is_set():
            episode.close()
        return episode

    try:
        return await called(
            name, "open", begin if inspect.iscoroutinefunction(begin) else opened, task_input
        )
    except BaseException:
        over.set()
        raise


def result(name: str, rows: list[Reward]) -> dict[str, Json]:
    return {"environment": name, "rewards": msgspec.to_builtins(rows)}


async def play(
    episode: Episode, endpoint: Endpoint, limit: int = 50, name: str = "environment"
) -> list[Reward]:
    """Play an episode to its end and return its scores; scores only of roles if no role is the
    agent. The reward of each step is recorded for its call. Raises EpisodeError for any error of
    the environment, including an episode of more than `limit` turns, and PolicyError if a model
    call fails."""
    if not callable(getattr(episode, "step", None)):
        raise EpisodeError(f"{name}: open returned {episode!r:.80}, which is no Episode")
    turns = Turns(name)
    try:
        observation = await called(name, "reset", turns.closing_late(episode, episode.reset))
        while not turns.done:
            if turns.count >= limit:
                raise EpisodeError(
                    f"{name}: an episode had not ended after {limit} turns; let step end it, with"
                    " the reward of one that was cut short, or give the environment a higher limit"
                )
            observation = await _turn(episode, endpoint, turns, observation)
        scores = await called(name, "rewards", episode.rewards)
        rows = turns.outcome() if scores is None else scores_of(scores, name)
    except BaseException:
        turns.over.set()
        with suppress(EpisodeError):  # the first error is the cause
            await called(name, "close", episode.close)
        raise
    rewards_before = _rewards_so_far()
    await called(name, "close", episode.close)
    if _rewards_so_far() > rewards_before:
        raise EpisodeError(f"{name}: close gave a reward, after the end; give it in step")
    return rows


async def _turn(
    episode: Episode, endpoint: Endpoint, turns: Turns, observation: Observation
) -> Observation:
    who = episode.role
    talk = turns.talks[who] if episode.keep else list[Message]()
    talk += _messages(observation, turns.name, "what an episode says")
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
    observation, reward, done = step
    if done is None or isinstance(done, str | bytes):
        what = f"step returned {done!r:.80} as whether the episode has ended; return True or False"
        raise EpisodeError(f"{turns.name}: {what}")
    turns.count, turns.done = turns.count + 1, bool(done)
    if reward is not None:
        rewards = reward if isinstance(reward, dict) else {who: reward}
        for role, value in rewards.items():
            turns.record(role, value)
    return observation


@dataclass
class Turns:
    """The record of an episode."""

    name: str
    talks: dict[str, list[Message]] = field(default_factory=lambda: defaultdict(list))  # by role
    calls: dict[str, str] = field(default_factory=dict)  # role -> id of its latest call
    totals: dict[str, float] = field(default_factory=dict)  # of the steps' rewards, by role
    count: int = 0
    done: bool = False
    over: threading.Event = field(default_factory=threading.Event)  # no method is awaited any more

    def closing_late(self, episode: Episode, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of an episode: if it ends after its rollout, the episode is closed again,
        to release resources that were opened after the first `close`. A thread cannot be
        cancelled."""
        if inspect.iscoroutinefunction(method):
            return method

        def run(*arguments: Any) -> Any:
            try:
                return method(*arguments)
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
        """The sum of the steps' rewards, also by role unless the agent plays alone."""
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
    """Add the rollout's outcome to scores of roles: the mean over the roles that a trained policy
    plays, or over all roles. Upstreams are not trained, nor are earlier versions (names with
    "@")."""
    outcomes = [row for row in rows if row.name == OUTCOME and row.scope is not Scope.TRANSITION]
    by_role = {row.target: row.value for row in outcomes if row.scope is Scope.ROLE}
    if len(by_role) < len(outcomes):
        return rows
    learn = {call.role for call in calls if call.version is not None and "@" not in call.policy}
    values = [value for role, value in by_role.items() if role in learn] or [*by_role.values()]
    return [Reward(fmean(values)), *rows] if values else rows


def scores_of(returned: Scores | None, name: str) -> list[Reward]:
    """Convert an environment's scores to reward rows. Raises EpisodeError for anything else."""
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


async def called(name: str, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a plug-in: in a thread, unless it is async."""
    try:
        if inspect.iscoroutinefunction(function):
            return await user_code.awaited(function(*arguments))
        returned = await user_code.in_thread(_inside, function, *arguments)
        return await user_code.awaited(returned) if inspect.isawaitable(returned) else returned
    except (EpisodeError, PolicyError):
        raise
    except AgentError as error:
        raise EpisodeError(f"{name}: {error}") from error
    except Exception as error:  # a plug-in may raise anything
        raise EpisodeError(f"{name}: {what} raised {user_code.text_of(error)}") from error


def _inside(function: Callable[..., Any], *arguments: Any) -> Any:
    attempt_log.enter_agent()
    return function(*arguments)


def _latest_call() -> str:
    log = attempt_log.current()
    return "" if log is None else " ".join(call.id for call in log.latest())


def _rewards_so_far() -> int:
    log = attempt_log.current()
    return 0 if log is None else len(log.rewards)


def _messages(messages: Any, name: str, what: str) -> list[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, list) and all(
        isinstance(message, dict) and "role" in message for message in messages
    ):
        return messages
    raise EpisodeError(f"{name}: {what} is {messages!r:.80}; make it a text or a list of messages")
