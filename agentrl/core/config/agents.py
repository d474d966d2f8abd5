"""Tables of agents: their tasks and verifiers, how they run, and who answers their calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from agentrl.core.config.base import Count, Natural, Seconds, Section

if TYPE_CHECKING:
    from agentrl.core.config.schema import RunConfig


Retried = Literal[
    "agent_error", "timeout", "verifier_error", "limit", "no_model_call", "workspace_error"
]
MAX_CALLS = 500  # by default: more than long work of coding agents needs


class AgentConfig(Section, frozen=True):
    """The unmodified agent and how it runs: a Python object (`path`), a `command`, or a coding
    `harness` with a preset."""

    path: str = ""  # Agent, as "file.py:name" or "package.module:name".
    command: str | list[str] = []  # Program in any language; a string is split as in a shell.
    # Coding harness: codex, claude, qwen, gemini, opencode, pi, mini, aider, or your own as
    # "file.toml" or "file.py:name". `command` is then its program, as a path if it is not in PATH,
    # and additional arguments.
    harness: str = ""
    folder: str = ""  # working directory of the command; default: the run file's, or the image's
    env: dict[str, str] = {}  # environment variables of the agent; only their names are stored
    # Patterns of variables of the runner that the agent also gets. By default a command or a pool
    # gets only basic ones such as PATH, an agent in the runner's process all but API keys of
    # models.
    pass_env: list[str] = []
    timeout: Seconds = 60.0  # seconds that one attempt may take
    max_attempts: Count = 3  # attempts per rollout, if the infrastructure fails
    # Other failures that are retried, up to `max_attempts`; after a verifier_error only the
    # verifier runs again. A model_error is always retried, a lost sandbox twice.
    retry: list[Retried] = []
    calls_optional: bool = False  # Whether rollouts may succeed without a model call.
    error_reward: float | None = None  # Outcome if the agent raises after a call; none: missing.
    # Model calls of one attempt, which ends after them; 0: unlimited. Agents that
    # retry until an answer has the right form would reach LangChain's own limit, 9,999.
    max_calls: Natural = MAX_CALLS
    max_tokens: Natural = 0  # sampled tokens of one attempt, which ends after them; 0: unlimited
    # An attempt that reaches a limit of time, calls or tokens has failed. score: score its trace
    # without a result; zero: give it the outcome 0; drop: give it no outcome.
    on_truncation: Literal["score", "zero", "drop"] = "drop"


class TasksConfig(Section, frozen=True):
    """Tasks, as a file that ends in .jsonl, .parquet, .csv or .json; as "file.py:name", an iterable
    of tasks or a function that returns one; or as a data set of the hub or of a folder,
    "hf:owner/name[/config][@revision][:split]"."""

    train: str = ""  # tasks of training
    heldout: str = ""  # tasks of evaluation; at least 50 for a meaningful curve
    # Field of a task -> the column that it is read from, such as input = "question". Default of
    # the input, except in .jsonl: column input, prompt, question, problem or instruction.
    columns: dict[str, str] = {}
    # Order of training tasks. shuffle: each training task once per epoch. difficulty: sample by
    # success rate, most often tasks that are solved half of the time; outcomes must be from 0 to 1.
    # unsolved: as shuffle, without tasks whose mean outcome has reached 0.9.
    order: Literal["shuffle", "difficulty", "unsolved"] = "shuffle"


class VerifierConfig(Section, frozen=True):
    """The functions that score rollouts."""

    path: str = ""  # Function that scores a rollout, as "file.py:name".
    rewards: dict[str, str] = {}  # additional rewards: name -> "file.py:name" or an entry point
    # Second verifier, as "file.py:name", for one in four rollouts: where the two disagree, the
    # reward is hacked. Its reward "audit" is not trained.
    audit: str = ""
    # Lowest and highest outcome; a rollout with an outcome outside has failed. none: any number.
    range: tuple[float, float] | None = None

    def problems(self, config: RunConfig) -> Iterator[str]:
        if self.range is not None and not self.range[0] < self.range[1]:
            yield f"verifier.range = {list(self.range)}: write the lowest outcome and the highest"


class AuditConfig(Section, frozen=True):
    """Attacks on the verifier, as by `agentrl audit`."""

    before: bool = True  # Whether a new run begins with an audit, of at most ten seconds.


class WorkspaceConfig(Section, frozen=True):
    """A folder for each attempt of a command: a git repository with one commit in which it works,
    and a HOME of its own. It is in the temporary folder (TMPDIR), and removed after scoring."""

    # Source of workspaces: "git:PATH@REVISION", a folder, or "task.KEY": a key of the task with one
    # of these or a mapping of file names to texts. Paths are relative to the run file. Empty: no
    # workspace.
    source: str = ""
    # Sandbox of the agent. user: run as the user nobody (needs root); unshare: in Linux namespaces;
    # bubblewrap: with bwrap; container: with runner.executor = "container". With user, unshare and
    # bubblewrap the agent can write only to its workspace and connect only to the gateway.
    sandbox: Literal["none", "user", "unshare", "bubblewrap", "container"] = "none"
    hide: list[str] = []  # additional files and folders that appear empty in the sandbox
    # Workspaces that are kept, in <output>/workspaces.
    keep: Literal["never", "failed", "always"] = "never"

    def problems(self, config: RunConfig) -> Iterator[str]:
        if not self.source:
            if self != WorkspaceConfig():
                yield "[workspace] has no effect without `source`, the files that it copies"
            return
        kind, sandbox = config.runner.executor, self.sandbox
        if config.agent.path or kind not in ("auto", "command", "container"):
            yield (
                "[workspace] is for an agent that is a command, run by runner.executor = 'command' "
                "or 'container'"
            )
        if (sandbox == "container") != (kind == "container"):
            yield (
                f"workspace.sandbox = {sandbox!r} with runner.executor = {kind!r}: the sandbox and "
                "the executor 'container' need each other; set both or neither"
            )


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
        conditions = msgspec.structs.asdict(self)
        if all(value in ({}, "", None) for key, value in conditions.items() if key != "role"):
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
            raise ValueError("give either base_url, or text, the answer to every call")
        if self.text is not None and (self.model or self.key_env):
            raise ValueError("model and key_env belong to a base_url, not to a text; remove them")


class SessionsConfig(Section, frozen=True):
    """How `agentrl gateway serve` records the sessions of a deployed agent."""

    # Seconds without a call after which a session ends; default: 1800, in a live run 60.
    idle: Seconds | None = None
    # Regular expressions. Matches are stored as [redacted], and such calls without their tokens.
    redact: list[str] = []
    # Environment variable with the API keys that callers may send as a bearer token or x-api-key,
    # separated by spaces. Empty: no keys, which is allowed only on this machine's loopback address.
    key_env: str = ""

    def __post_init__(self) -> None:
        for pattern in self.redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"redact has {pattern!r}: {error}") from None
