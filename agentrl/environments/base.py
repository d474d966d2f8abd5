"""What a plug-in writes: an `Environment`, and an `Episode` if it is played in turns.

An environment has `tasks` and exactly one of
  - `run(input, endpoint)`: it calls the model itself, and returns scores; async, or a plain
    function, which runs in a thread
  - `open(input)`: an `Episode`, whose turns `play` drives
  - `verify(task, result)`: a data set and its scorer; the run file's agent plays, by default one
    model call with the task's input

Scores are what a verifier may return: a number, {name: number}, or a list of `agentrl.Reward`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentrl.core.config import RoleRule
from agentrl.core.errors import AgentRLError
from agentrl.core.types import ErrorKind, Json, Reward

Message = dict[str, Any]


Observation = str | list[Message]  # of the next model: a user's message, or messages


Scores = float | dict[str, float] | list[Reward]


KINDS = ("run", "open", "verify")


class EpisodeError(AgentRLError):
    """A rollout failed because of its environment, which the message names. It is not the agent's
    failure, so `agent.error_reward` does not score it."""

    kind = ErrorKind.VERIFIER


class Environment:
    """Base class of plug-ins. `what` and `options` come from the run file:
    `environment = "PLUGIN:WHAT"` and `[environment_options]`."""

    # What `agentrl env install PLUGIN` installs, pinned. A plug-in imports it inside of functions,
    # so that its module can be read without it.
    requires: ClassVar[tuple[str, ...]] = ()
    # process: one rollout at a time in a process, for what is global or breaks in threads
    isolation: ClassVar[Literal["none", "process"]] = "none"
    # Roles that it asks besides the one that plays: users, judges, opponents. The run file must say
    # who answers them, so that the policy does not do it in silence.
    roles: tuple[str, ...] = ()
    role_rules: Sequence[RoleRule] = ()  # of calls that its program makes for itself
    limit: int = 50  # most turns of an episode
    root: Path = Path()  # the run file's folder, for paths; known in `__init__`

    def __init__(self, what: str, **options: Any) -> None: ...

    def tasks(self, split: str) -> Iterable[dict[str, Json]]:
        """The tasks of "train" or "heldout": {"id": ..., "input": ..., more}. Ids are the same in
        every process and unique over both; values are JSON. Held-out tasks that ask what a training
        task asks are left out: by "question", which may be a digest, or else by the input. An
        "answer" is the right one, which `agentrl doctor --environment` looks at."""
        raise NotImplementedError

    def solution(self, input: Any) -> Any:
        """Ground truth: the replies that solve a task, in order, each a text or an assistant's
        message with tool_calls; by role if there are several; None: unknown."""
        return None


class Episode:
    """One episode of a turn-based environment. Its methods run in threads."""

    tools: list[dict[str, Any]] | None = None  # in OpenAI's schema
    role: str = "agent"  # who moves next; may change between steps
    keep: bool = True  # each role's conversation grows; False: each move is one of its own

    def reset(self) -> Observation:
        """Begin; return what the first to move is told."""
        raise NotImplementedError

    def step(self, reply: Message) -> tuple[Observation, float | dict[str, float] | None, bool]:
        """Act on a reply, an assistant's message; return what is said next, the reward of this
        reply or None, and whether the episode has ended.

        The reward may be several, by role, each for the role's latest reply: of a move by which
        others lose, or of moves that are made at the same time."""
        raise NotImplementedError

    def rewards(self) -> Scores | None:
        """The scores after the end; None: the sum of the steps' rewards."""
        return None

    def close(self) -> None:
        """Release what the episode holds; called at the end, also after an error, and once more if
        a method outlasts its rollout, for what it has opened meanwhile."""
