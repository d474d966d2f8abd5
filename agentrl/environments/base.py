"""Base classes of plug-ins: `Environment`, and `Episode` for environments that are played in turns.

An environment has `tasks` and exactly one of
  - `run(input, endpoint)`: it calls the model itself, and returns scores; async, or a plain
    function, which runs in a thread
  - `open(input)`: an `Episode`, whose turns `play` drives
  - `verify(task, result)`: a data set and its scorer; the run file's agent plays, by default one
    model call with the task's input

Scores have the types that verifiers may return: a number, {name: number}, or a list of
`agentrl.Reward`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentrl.core.config import RoleRule
from agentrl.core.errors import AgentRLError
from agentrl.core.types import ErrorKind, Json, Reward

Message = dict[str, Any]


Observation = str | list[Message]  # the next model's input: a user message, or a list of messages


Scores = float | dict[str, float] | list[Reward]


KINDS = ("run", "open", "verify")


class EpisodeError(AgentRLError):
    """A rollout failed because of its environment, which the message names. It is not the agent's
    failure, so `agent.error_reward` does not score it."""

    kind = ErrorKind.VERIFIER


class Environment:
    """Base class of plug-ins. `what` and `options` come from the run file:
    `environment = "PLUGIN:WHAT"` and `[environment_options]`."""

    # Pinned requirements that `agentrl env install PLUGIN` installs. A plug-in imports them inside
    # functions, so that its module can be imported without them.
    requires: ClassVar[tuple[str, ...]] = ()
    # process: one rollout at a time per process, for global state or code that is not thread-safe
    isolation: ClassVar[Literal["none", "process"]] = "none"
    # Roles that the environment calls besides the player: users, judges, opponents. The run file
    # must map them to models, so that the policy does not silently answer them.
    roles: tuple[str, ...] = ()
    role_rules: Sequence[RoleRule] = ()  # rules for the roles of auxiliary calls of its program
    limit: int = 50  # maximum turns of an episode
    root: Path = Path()  # the run file's folder, for paths; set before `__init__`

    def __init__(self, what: str, **options: Any) -> None: ...

    def tasks(self, split: str) -> Iterable[dict[str, Json]]:
        """The tasks of "train" or "heldout": {"id": ..., "input": ..., more}. Ids are the same in
        every process and unique over both; values are JSON. Held-out tasks with the question of a
        training task are left out; questions are compared by "question", which may be a digest, or
        else by the input. "answer" is the right answer, which `agentrl doctor --environment`
        checks."""
        raise NotImplementedError

    def solution(self, input: Any) -> Any:
        """Ground truth: the replies that solve a task, in order, each a text or an assistant's
        message with tool_calls; by role if there are several; None: unknown."""
        return None


class Episode:
    """One episode of a turn-based environment. Its methods run in threads."""

    tools: list[dict[str, Any]] | None = None  # in OpenAI's schema
    role: str = "agent"  # the role that moves next; may change between steps
    # Whether each role has one growing conversation; False: each move is a separate conversation.
    keep: bool = True

    def reset(self) -> Observation:
        """Begin; return the first observation."""
        raise NotImplementedError

    def step(self, reply: Message) -> tuple[Observation, float | dict[str, float] | None, bool]:
        """Act on a reply, an assistant message; return the next observation, the reward of this
        reply or None, and whether the episode has ended. The reward may be a dict by role, each
        value for the role's latest reply, for example if others lose by a move, or if moves are
        simultaneous."""
        raise NotImplementedError

    def rewards(self) -> Scores | None:
        """The scores after the end; None: the sum of the steps' rewards."""
        return None

    def close(self) -> None:
        """Release resources. Called at the end, also after an error, and once more if a method
        outlasts its rollout, for resources that it has opened meanwhile."""
