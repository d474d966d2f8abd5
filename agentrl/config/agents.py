"""Tables of agents: how they run, and the roles of their calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from agentrl.base.parts import missing
from agentrl.config.base import Count, Natural, Seconds, Section


class RetriesConfig(Section, frozen=True):
    """Number of retries of a rollout after each kind of failure. none: limited only by
    `max_attempts`, which always applies."""

    agent_error: Natural | None = 0  # Retries after the agent raised, or its command failed.
    timeout: Natural | None = 0  # Retries after it took longer than agent.timeout.
    model_error: Natural | None = None  # Retries after the policy server or an upstream failed.
    # Retries of the verifier after it raised, on the same run of the agent.
    verifier_error: Natural | None = 0
    limit: Natural | None = 0  # Retries after it reached agent.max_calls or agent.max_tokens.
    no_model_call: Natural | None = 0  # Retries after it ended without a model call.
    workspace_error: Natural | None = 0  # Retries after its workspace could not be created.
    # Retries after its sandbox was lost; dead runners count only for `max_attempts`.
    lost_runner: Natural = 2


MAX_CALLS = 500  # by default: more than long work of coding agents needs


class AgentConfig(Section, frozen=True):
    """The unmodified agent and how it runs: a Python object (`path`), a `command`, or a coding
    `harness` with a preset."""

    path: str = ""  # Agent, as "file.py:name" or "package.module:name".
    command: str | list[str] = []  # Program in any language; a string is split like in a shell.
    # Coding harness: codex, claude, qwen, gemini, opencode, pi, mini, aider, or your own as
    # "file.toml" or "file.py:name". `command` is then the path of its program if that is not in
    # PATH.
    harness: str = ""
    args: list[str] = []  # additional arguments of the harness
    context: Count = 32768  # context length of the model in tokens, as told to the harness
    folder: str = ""  # working directory of the command; default: the run file's, or the image's
    env: dict[str, str] = {}  # environment variables of the agent; only their names are stored
    # Patterns of variables of the runner that the agent also gets. By default a command or a pool
    # gets only basic ones such as PATH, an agent in the runner's process all but API keys of
    # models.
    pass_env: list[str] = []
    timeout: Seconds = 60.0  # seconds that one attempt may take
    max_attempts: Count = 3  # attempts per rollout, if the infrastructure fails
    retries: RetriesConfig = RetriesConfig()
    calls_optional: bool = False  # Whether a rollout without a model call is no failure.
    error_reward: float | None = None  # Outcome if the agent raises after a call; none: missing.
    # Model calls of one attempt, which ends after them; 0: unlimited. LangChain's own limit is
    # 9,999, which an agent reaches that asks until it gets a form that the policy does not give.
    max_calls: Natural = MAX_CALLS
    max_tokens: Natural = 0  # sampled tokens of one attempt, which ends after them; 0: unlimited
    # An attempt that reaches a limit of time, calls or tokens has failed. score: score its trace
    # without a result; zero: give it the outcome 0; drop: give it no outcome.
    on_truncation: Literal["score", "zero", "drop"] = "drop"

    def problems(self, config: Any) -> Iterator[str]:
        if self.harness and (why := missing("runner", "agent.harness")):
            yield f"agent.harness = {self.harness!r}: {why}"
        why = missing("executors", "command")
        if why and (self.harness or self.command) and config.runner.executor == "auto":
            yield f"agent.{'harness' if self.harness else 'command'} starts processes; {why}"


class RoleRule(Section, frozen=True):
    """Gives a role to calls that match all properties. In a pattern * matches any text."""

    role: Annotated[str, msgspec.Meta(min_length=1)]  # role of matching calls
    header: dict[str, str] = {}  # name of a header -> pattern of its value
    field: dict[str, str] = {}  # dotted key in the body -> pattern of its value (as JSON)
    model: str = ""  # pattern of the requested model
    system: str = ""  # pattern of the beginning of the system message
    prompt: str = ""  # pattern of the beginning of the last message, from the user
    tools: bool | None = None  # whether the request has tools
    schema: bool | None = None  # whether the answer must follow a JSON schema

    def __post_init__(self) -> None:
        given = msgspec.structs.asdict(self)
        if all(value in ({}, "", None) for key, value in given.items() if key != "role"):
            raise ValueError(f"the rule for {self.role!r} has no condition; add at least one")


class UpstreamConfig(Section, frozen=True):
    """An endpoint that answers calls and is not trained, such as a judge, an opponent or a tool's
    model; or a `text` that answers every call."""

    # Address of the server, which ends in /v1.
    base_url: Annotated[str, msgspec.Meta(pattern=r"^(https?://.*)?$")] = ""
    model: str = ""  # name of the model on the server; empty: the name in the agent's request
    key_env: str = ""  # environment variable of the runner with its API key
    text: str | None = None  # answer to every call, instead of an endpoint

    def __post_init__(self) -> None:
        if (self.text is None) != bool(self.base_url):
            raise ValueError("give either its base_url or the text that is its answer")
        if self.text is not None and (self.model or self.key_env):
            raise ValueError("model and key_env are of a base_url, not of a text; remove them")
