"""The tables of agents: how they are run, where they work, and which roles their calls have."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from agentrl.config.base import Count, Natural, Seconds, Section


class RetriesConfig(Section, frozen=True):
    """How often a rollout is tried again after a failure of each kind. None: as often as
    `max_attempts` allows, which is the limit in any case."""

    agent_error: Natural | None = 0  # the agent raised, or its command ended with an error
    timeout: Natural | None = 0  # it took longer than agent.timeout
    model_error: Natural | None = None  # the policy server or an upstream failed
    verifier_error: Natural | None = 0  # the verifier raised
    limit: Natural | None = 0  # it ran out of agent.max_calls or agent.max_tokens
    no_model_call: Natural | None = 0  # it ended without asking the model
    workspace_error: Natural | None = 0  # its workspace could not be made
    lost_runner: Natural = 2  # lost by the sandbox; dead runners only count for `max_attempts`


class AgentConfig(Section, frozen=True):
    """The unmodified agent and how it is run: a Python object by `path`, a `command`, or a coding
    `harness` with a preset."""

    path: str = ""  # "file.py:name" or "package.module:name"
    command: str | list[str] = []  # in any language; a string is split as a shell would
    # codex, claude, qwen, gemini, opencode, pi, mini, aider, or your own as "file.toml" or
    # "file.py:name"; `command` is then where its program is, if not in PATH.
    harness: str = ""
    args: list[str] = []  # more arguments of the harness
    context: Count = 32768  # tokens that the harness believes the model to read
    folder: str = ""  # where the command works; default: the run file's folder, or the image's
    env: dict[str, str] = {}  # the agent's own variables; only their names are stored
    # Patterns of variables of the runner that the agent sees too. A command or a pool sees PATH and
    # the like without them, an agent in the runner's process all but the keys of models.
    pass_env: list[str] = []
    timeout: Seconds = 60.0  # for one attempt
    max_attempts: Count = 3  # tries at one rollout when the infrastructure fails
    retries: RetriesConfig = RetriesConfig()
    calls_optional: bool = False  # a rollout without a model call has not failed
    error_reward: float | None = None  # outcome when the agent itself raises; none: missing
    max_calls: Natural = 0  # model calls of one attempt, which then ends; 0: any number
    max_tokens: Natural = 0  # sampled in all its calls, after which it ends; 0: any number
    # An attempt that ran out of time, calls or tokens has failed. Its trace is scored as if it had
    # ended by itself, without a result (score), gets the outcome 0 (zero), or none (drop).
    partial: Literal["score", "zero", "drop"] = "drop"


class WorkspaceConfig(Section, frozen=True):
    """A folder for each attempt of a command: a git repository of one commit in which it works, and
    a HOME of its own. It is removed when the attempt has been scored."""

    # "git:PATH@REVISION", a folder, or "task.KEY": what a task has there, one of the former or a
    # mapping of file names to texts. Paths are relative to the run file. Empty: no workspace.
    source: str = ""
    # user: as another user (needs root); unshare: in Linux namespaces; bubblewrap: by the program
    # bwrap; container: as runner.executor says. user, unshare and bubblewrap let the agent write to
    # its workspace alone and connect to the gateway alone.
    sandbox: Literal["none", "user", "unshare", "bubblewrap", "container"] = "none"
    user: str = "nobody"  # of sandbox = "user"
    hide: list[str] = []  # more files and folders that look empty in the sandbox
    keep: Literal["never", "failed", "always"] = "never"  # in <output>/workspaces
    folder: str = ""  # where workspaces are made; default: the system's temporary folder
    timeout: Seconds = 60.0  # for making one


class RoleRule(Section, frozen=True):
    """A call that has all these properties has this role. In a pattern * stands for any text."""

    role: Annotated[str, msgspec.Meta(min_length=1)]  # that such a call has
    header: dict[str, str] = {}  # name of a header -> pattern of its value
    field: dict[str, str] = {}  # dotted key in the body -> pattern of its value, or of that as JSON
    model: str = ""  # pattern of the model that it asks for
    system: str = ""  # pattern of the beginning of the system text
    prompt: str = ""  # pattern of the beginning of the last text, which is the user's
    tools: bool | None = None  # whether it offers tools
    schema: bool | None = None  # whether its answer must follow a JSON schema

    def __post_init__(self) -> None:
        given = msgspec.structs.asdict(self)
        if all(value in ({}, "", None) for key, value in given.items() if key != "role"):
            raise ValueError(f"the rule of {self.role!r} says nothing of the calls it is for")
