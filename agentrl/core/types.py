"""The records of the system, with the same names in Python, SQL, JSON, command line and docs.

task -> group -> rollout -> attempt -> call. Records are frozen; only the store keeps them.

Training steps count from 0 in records and from 1 for people: see `step_number`.

`TrainingResult` is the result of a training run. Scores in texts are percentages if all scores of
the run are from 0 to 1, else numbers; failed rollouts are summarised in one sentence.
"""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from itertools import chain
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import field
from msgspec.structs import replace

from agentrl.core.errors import AgentRLError

Json = Any  # a user's payload: any JSON value
Task = Mapping[str, Json]
"""JSON object. The agent gets `input`, the verifier the whole object; `id` is optional."""
AUXILIARY_ROLE = "side"  # of calls outside the agent's own work, such as titles; never trained
INSTRUCTION_ROLES = ("system", "developer")  # of messages
ANY_ROLE = "*"  # in [roles], the roles that it does not name
POLICY = "policy"  # name of the trained policy in a run with a single one
EMPTY = "rollouts/empty"  # metric: number of rollouts of a step in which none was usable
ENDED = "run/ended"  # metric of a run's last step: 1 once no more rollouts will be queued
SESSION = -1  # step of rollouts that are sessions of a deployed agent; never trained
FEEDBACK, CORRECTION = "feedback", "correction"  # rewards; a correction's text is in its note
SIGNAL = "signal"  # reward of a call, derived from the message or tool result after it
HINDSIGHT = "hindsight"  # reward of a call: its log-prob once the outcome is known
TURN = "turn"  # reward of a call, derived from comments on its turn
TOLD = "told"  # reward of a call: its log-prob given additional context, minus that without


if TYPE_CHECKING:
    Int32 = array[int]
    Float32 = array[float]
else:  # codecs must distinguish the two, and `array[int]` fails at run time before Python 3.12

    class Int32(array):
        """Token ids."""

        __slots__ = ()

    class Float32(array):
        """Log-probs."""

        __slots__ = ()


def int32(values: Any = ()) -> array[int]:
    """Token ids in their stored form: int32, contiguous. Raises OverflowError outside int32."""
    return array("i", values)


def float32(values: Any = ()) -> array[float]:
    """Log-probs in their stored form: float32, contiguous."""
    return array("f", values)


class Purpose(StrEnum):
    """Why a rollout was requested. Evaluation rollouts are never trained on."""

    TRAIN = "train"
    EVAL = "eval"


class RolloutState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED)


class AttemptState(StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"  # the lease ran out: the runner is presumed dead
    CANCELLED = "cancelled"


class ErrorKind(StrEnum):
    """Why an attempt failed. A failed rollout has a missing reward, not a reward of 0."""

    AGENT = "agent_error"
    TIMEOUT = "timeout"
    MODEL = "model_error"
    VERIFIER = "verifier_error"
    LIMIT = "limit"  # it reached agent.max_calls or agent.max_tokens
    NO_CALL = "no_model_call"
    WORKSPACE = "workspace_error"  # its files cannot be created or copied
    LOST_RUNNER = "lost_runner"
    CANCELLED = "cancelled"


class Scope(StrEnum):
    """The object of a reward."""

    TRANSITION = "transition"
    ROLE = "role"
    ROLLOUT = "rollout"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all stored records."""


class Sampling(Record, frozen=True):
    """Sampling parameters. In a rollout: defaults for parameters that the agent does not set."""

    temperature: float = 1.0  # Temperature of sampling; 0: greedy. Training needs about 1.
    top_p: float = 1.0  # Probability mass of the candidate tokens (nucleus sampling); train with 1.
    top_k: int = 0  # Number of candidate tokens; 0: no limit.
    max_tokens: int | None = None  # Most tokens of one completion; none: up to the context length.
    seed: int | None = None  # Seed, different for each rollout of a run; none: for each call.
    override_agent: bool = False  # Whether temperature, top_p and top_k override the agent's.


class Branch(Record, frozen=True):
    """The start of a rollout: it replays the first `calls` of another, ended rollout.

    `without`: roles whose calls are not replayed, because other policies play them here. Such a
    rollout shows how the other one would have ended without these roles; it is never trained on."""

    rollout: str
    calls: int
    without: list[str] = []


class NewRollout(Record, frozen=True):
    """A request for one execution of the agent. The caller chooses `id`; a repeat is a no-op."""

    id: str
    run: str
    group: str
    index: int  # position inside the group
    task: dict[str, Json]
    purpose: Purpose = Purpose.TRAIN
    sampling: Sampling = Sampling()
    step: int = 0  # the training step, from 0, that it is planned for, and requested by or before
    max_attempts: int = 3
    timeout: float = 60.0  # seconds for one attempt
    priority: int = 0  # larger is claimed first
    branch: Branch | None = None
    seats: dict[str, str] = {}  # role or policy -> policy that plays it here, over the run file
    candidate: str | None = None  # id of the prompt texts to use; None: the agent's own


class PromptText(Record, frozen=True):
    """A replacement for one of the agent's prompt texts."""

    component: str
    role: str
    seed: str  # text to replace in system or developer message, or in `tool`; "": insert `text`
    text: str
    tool: str = ""


class Attempt(Record, frozen=True):
    """One try at a rollout: a lease. `id` is the 32-hex-digit OpenTelemetry trace id. Each claim
    creates a new attempt with the next fence, so the id implies the fence in writes of calls or
    spans."""

    id: str
    rollout: NewRollout
    fence: int  # 1 for the first attempt of a rollout; only the highest fence may write
    lease_until: float  # unix seconds
    ran: Json = None  # `Outcome.ran` of an earlier attempt: only score its trace
    prompts: list[PromptText] = []  # texts of the rollout's candidate


class Transition(Record, frozen=True):
    """One model call as an RL step: state = `prompt`, action = `completion`.

    `prompt` [P] and `completion` [C] are int32 token ids, `logprobs` [C] the sampler's float32
    log-probs at `sampling.temperature`. `exact` is false if the upstream returned no token ids.
    `messages` and `tools` are those of the agent's request, `answer` is the chat message that it
    received, and `ignored` has the options of the request that had no effect. A call that
    `repeats` another was answered from the store, not by the policy: it is context only.

    `version` is the policy version of the first sampled token. `spans` are ranges of tokens: (index
    of the first token, version) for each version, such as `[(0, 7), (12, 8)]`; empty if there is
    only one. `span` is the id of the OpenTelemetry `Span` in which the agent made the call.
    """

    id: str
    attempt: str
    index: int  # within the attempt, from 0, in the order in which the responses arrived
    prompt: Int32
    completion: Int32
    logprobs: Float32
    role: str = "agent"
    policy: str = POLICY
    version: int | None = None
    sampling: Sampling = Sampling()
    finish: str = "stop"  # the API's finish_reason; "cut": the agent stopped reading
    exact: bool = True
    messages: list[dict[str, Json]] = []
    tools: list[dict[str, Json]] = []
    answer: dict[str, Json] | None = None
    span: str | None = None  # parent span id of the request, 16 hex digits
    started: float = 0.0  # unix seconds
    seconds: float = 0.0
    repeats: str | None = None  # id of the call of another rollout that it replays
    ignored: list[str] = field(default_factory=list, name="left_out")  # fields and hosted tools
    spans: list[tuple[int, int]] = []  # in ascending order of versions
    processors: dict[str, str] = {}  # options that alter the policy's distribution -> their JSON
    images: tuple[str, ...] = ()  # digests of the prompt's images, in order; see `Image`

    @property
    def versions(self) -> str:
        return versions_in_words(self.version, self.spans)


def versions_in_words(first: int | None, spans: Sequence[tuple[int, int]]) -> str:
    """The versions of a call for display, `v7` or `v7→v8@12`; empty if unknown."""
    text = "" if first is None else f"v{first}"
    return text + "".join(f"→v{version}@{start}" for start, version in spans[1:])


class Image(Record, frozen=True):
    """An image file as the agent sent it. Messages name it by `image:DIGEST` in place of its URL.
    Width and height are those in the file's header."""

    digest: str  # sha256 of `body`, in hexadecimal
    media_type: str  # such as image/png
    width: int
    height: int
    body: bytes


class Reward(Record, frozen=True):
    """A reward of a rollout, a role or a call. A missing reward has no row."""

    value: float
    name: str = "outcome"
    scope: Scope = Scope.ROLLOUT
    target: str | None = None  # role name or call id, depending on the scope
    source: str = "verifier"
    note: str = ""  # the verifier's explanation


class Span(Record, frozen=True):
    """An OpenTelemetry span of an attempt. Times are unix nanoseconds."""

    id: str  # 16 hex digits
    attempt: str
    parent: str | None
    name: str
    kind: str  # agent, chain, tool, llm or internal
    start: int
    end: int
    ok: bool = True
    attributes: dict[str, Json] = {}


class Failure(Record, frozen=True):
    kind: ErrorKind
    message: str
    traceback: str = ""


class FailureCount(Record, frozen=True):
    """The number of failed attempts of one kind in a run, and the last of them."""

    kind: ErrorKind
    attempts: int
    rollout: str
    message: str


class Outcome(Record, frozen=True):
    """How an attempt ended: with a `failure` or, without one, successfully."""

    attempt: str
    fence: int
    result: Json = None
    rewards: list[Reward] = []
    spans: list[Span] = []
    failure: Failure | None = None
    retry: bool = False  # retry with the next fence if attempts are left
    ran: Json = None  # the agent's result if it has ended and is not yet scored


class Rollout(Record, frozen=True):
    """The current state of a rollout in the store; `attempt` is the last one, which counts."""

    id: str
    run: str
    group: str
    index: int
    task: dict[str, Json]
    purpose: Purpose
    state: RolloutState
    step: int
    attempts: int
    attempt: str | None
    result: Json
    failure: Failure | None
    rewards: list[Reward] = []
    transitions: list[Transition] = []
    seconds: float = 0.0  # of the last attempt
    trained: int | None = None  # the step that trained its group
    branch: Branch | None = None
    seats: dict[str, str] = {}  # role or policy -> policy that played it here
    candidate: str | None = None

    def reward(self, name: str = "outcome") -> float:
        """Rollout-scope reward of that name; NaN if missing."""
        rows = (row for row in self.rewards if row.scope is Scope.ROLLOUT and row.name == name)
        return next((row.value for row in rows), float("nan"))


class Group(Record, frozen=True):
    """The rollouts of one task that are compared with each other; all are terminal."""

    id: str
    run: str
    step: int
    rollouts: list[Rollout]


class PolicyVersion(Record, frozen=True):
    """The current server of a policy, to which the gateway routes calls."""

    run: str
    policy: str
    version: int
    base_url: str  # Address of the server, which ends in /v1.
    model: str  # the name the server answers to


class Credit(Record, frozen=True):
    """The credit of one call in a training step: arrays of one number per completion token, or a
    single number if all are equal. NaN = missing."""

    transition: str
    policy: str
    advantage: Float32  # NaN: not in the loss
    baseline: Float32  # the algorithm's baselines and reward penalties, concatenated
    gate: Float32  # product of the gates' factors
    weight: Float32  # weight in the loss
    psi: Float32  # coefficient of the log-prob's gradient


class StepReward(Record, frozen=True):
    """A reward that a training step gave to a rollout, or to one of its calls or roles."""

    rollout: str
    reward: Reward


class StepCommit(Record, frozen=True):
    """All results of one training step, stored in one transaction."""

    run: str
    epoch: int
    step: int
    groups: list[str]
    versions: dict[str, int]
    checkpoint: str | None  # none: nothing was learned, so the previous checkpoint stays
    metrics: dict[str, float]
    discarded: list[str] = []  # groups that this step settles without training on them
    credits: list[Credit] = []  # of calls of `groups`
    rewards: list[StepReward] = []  # of rollouts of `groups`


class RunState(Record, frozen=True):
    """The state from which a restarted algorithm resumes exactly after its last commit."""

    run: str
    epoch: int  # incremented by every open_run; older epochs are fenced
    step: int  # the next step to train; 0 for a new run
    checkpoint: str | None
    config: dict[str, Json]
    created: float = 0.0  # unix seconds
    owner: str = ""  # last process that held the run, see `agentrl.store.run_folder`
    owned_until: float = 0.0  # unix seconds; 0: it has ended

    @property
    def identity(self) -> str:
        """An id that distinguishes this run from earlier ones of the same name."""
        return f"{self.run}@{self.created}"


class StepRow(Record, frozen=True):
    """A committed step (or a logged evaluation) with its metrics."""

    run: str
    step: int  # from 0; people count from 1, see `step_number`
    metrics: dict[str, float]
    committed: bool
    at: float  # unix seconds of its commit, before that of its last metrics


# Metrics of a stored step that are measured before it, such as an evaluation.
BEFORE_STEP = re.compile(r"(.+/)?eval/|time/(eval|build)|run/")


def step_number(step: int, purpose: Purpose = Purpose.TRAIN) -> int:
    """The number that people see and give for a stored step. Training steps count from 1, in the
    store from 0; the step of an evaluation is the number of steps before it, in both."""
    return step + 1 if purpose is Purpose.TRAIN else step


def stored_steps(number: int) -> dict[Purpose, int]:
    """The stored steps of a number that a person gave: that of training (none for 0), and that of
    the evaluation after it."""
    steps = {purpose: number - step_number(0, purpose) for purpose in Purpose}
    return {purpose: step for purpose, step in steps.items() if step >= 0}


def step_in_words(step: int, purpose: Purpose = Purpose.TRAIN) -> str:
    """`step 6`, of an evaluation `after step 5`."""
    if step == SESSION:
        return "a session"
    if purpose is Purpose.TRAIN:
        return f"step {step_number(step)}"
    return f"after step {step}" if step else "before training"


def metric_step(name: str, step: int) -> int:
    """The number of a metric's stored step: the first training step is 1, and the score of the
    untrained policy is at 0."""
    return step_number(step, Purpose.EVAL if BEFORE_STEP.match(name) else Purpose.TRAIN)


def split_step(row: StepRow) -> list[StepRow]:
    """A stored row as rows with the numbers that people see: that of the evaluation before the
    training step, if there was one, and that of the training step."""
    before = {name: x for name, x in row.metrics.items() if metric_step(name, row.step) == row.step}
    training = {name: x for name, x in row.metrics.items() if name not in before}
    evaluated = [replace(row, metrics=before, committed=False)] if before else []
    trained = [replace(row, step=step_number(row.step), metrics=training)]
    return evaluated + (trained if training or row.committed else [])


def numbered(rows: Iterable[StepRow]) -> list[StepRow]:
    """Stored rows as rows with the numbers that people see, each with the metrics of the training
    step and of the evaluation after it; row 0 has only the evaluation before training."""
    by_number: dict[int, StepRow] = {}
    for part in chain.from_iterable(map(split_step, rows)):
        trained = by_number.get(part.step)
        metrics = part.metrics if trained is None else trained.metrics | part.metrics
        by_number[part.step] = replace(trained or part, metrics=metrics)
    return [*by_number.values()]


class Counts(Record, frozen=True):
    """Numbers of rollouts of a run by state, of groups by state, and of tokens."""

    queued: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    groups_open: int = 0
    groups_settled: int = 0
    groups_trained: int = 0
    groups_discarded: int = 0
    transitions: int = 0
    inexact: int = 0  # calls without token ids
    tokens: int = 0  # completion tokens


class Trace(Record, frozen=True):
    """All stored records of one attempt."""

    rollout: Rollout
    attempt: str
    transitions: list[Transition]
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a run. Scores are mean held-out rewards; None: not evaluated."""

    before: float | None
    after: float | None
    before_sampled: float | None
    after_sampled: float | None
    seconds: float
    checkpoint: str | None
    store: str
    history: Sequence[StepRow] = dataclasses.field(
        default=(), repr=False
    )  # every step with its metrics

    def to_pandas(self) -> Any:
        """A DataFrame with a row per step and a column per metric, NaN where a step has none."""
        try:
            pandas: Any = import_module("pandas")
        except ImportError:
            raise AgentRLError(
                "to_pandas() needs pandas: pip install pandas; without it, `history` has the same"
            ) from None
        rows = [
            {"step": row.step, "committed": row.committed} | row.metrics for row in self.history
        ]
        frame = pandas.DataFrame(rows, columns=None if rows else ["step", "committed"])
        return frame.set_index("step")


ROUNDING, SMALL = 1e-9, 0.0005
SCORES = ("eval/score", "eval/sampled")
MISSING = tuple(f"{name}_missing" for name in SCORES)  # metrics: rollouts without a score
REWARDS = {"reward/mean", "reward/std"}


def decisive(names: Iterable[str]) -> list[str]:
    """The metrics that decide whether a run's scores are percentages, of these."""
    return [
        name
        for name in names
        if name in REWARDS or (name.startswith(SCORES) and not name.endswith("_missing"))
    ]


def missing_text(missing: float) -> str:
    """A note after a score: how many rollouts have no outcome and are not included; empty if
    none."""
    return f", {missing:.0f} rollout{'s' * (missing != 1)} without a score" if missing else ""


def are_shares(rows: Iterable[Mapping[str, float]], outcomes: Iterable[float] = ()) -> bool:
    """Whether outcomes may be shown as percentages. `rows`: the metrics of steps. True if all
    scores, bounds and known outcomes are from 0 to 1, and no standard deviation of training rewards
    is larger than such numbers allow (returns of -1 and 1 exceed it)."""
    scores = list(filter(isfinite, outcomes))
    spread = []  # (mean, variance)
    for row in rows:
        scores += [row[name] for name in decisive(row) if name not in REWARDS]
        spread.append((row.get("reward/mean", 0.0), row.get("reward/std", 0.0) ** 2))
    return all(-ROUNDING <= x <= 1.0 + ROUNDING for x in scores if isfinite(x)) and all(
        -ROUNDING <= mean <= 1.0 + ROUNDING and variance <= mean * (1.0 - mean) + ROUNDING
        for mean, variance in spread
        if isfinite(mean)
    )


def score_text(value: float, share: bool, form: str = ".3f") -> str:
    """A score as text: a percentage if the run's scores are shares, else in the format `form`; a
    dash if missing."""
    if isnan(value):
        return "-"
    if share and 0.0 < abs(value) < SMALL:
        return f"{100 * value:.1g}%"  # instead of 0.0%
    return format(value, ".1%" if share else form)


def gain_text(value: float, share: bool) -> str:
    """A difference of two scores, with its sign."""
    return f"{value * 100:+.1f} points" if share else f"{value:+.3f}"


MAX_MESSAGE_CHARS = 400  # characters of a message
# Of the embedded server, vLLM, SGLang, OpenAI and Anthropic, about a prompt that is too long.
TOO_LONG = re.compile(r"context[ _-](length|window|size)|model's context|prompt is too long", re.I)
LOOPS = (  # of an agent that repeats its call until an answer has the expected format
    "added nothing to the policy's last answer, such as a tool's result: the agent retries until it"
    " gets a tool call or a structured answer, but gets plain text"
)
VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\S*\d\S*")
FIX_HINTS = {  # for rollouts that all fail in the same way
    ErrorKind.AGENT: "Correct the agent (agent.path, agent.command or agent.harness)",
    ErrorKind.NO_CALL: "Let the agent call the policy",
    ErrorKind.TIMEOUT: "Raise agent.timeout, or make the agent faster",
    ErrorKind.LIMIT: "Raise agent.max_calls or agent.max_tokens",
    ErrorKind.MODEL: "Check the model's server (policy, engine, upstreams)",
    ErrorKind.VERIFIER: "Correct it",
    ErrorKind.WORKSPACE: "Correct [workspace]: its source and its commands",
    ErrorKind.LOST_RUNNER: "Check the runner's machine and sandbox",
    ErrorKind.CANCELLED: "Let the rollouts end",
}


def same_cause(failure: Failure) -> tuple[ErrorKind, str]:
    """A key that is equal for failures with the same cause: the kind, and the message without
    numbers, ids and quoted values."""
    line = next(iter(failure.message.strip().splitlines()), "")
    return failure.kind, VARIES.sub("#", line)


def how_many(failed: int) -> str:
    return f"{failed} rollout{'s' * (failed != 1)} failed"


def fix_hint(kind: ErrorKind, message: str) -> str:
    """A fix for rollouts that all fail in this way."""
    if TOO_LONG.search(message):
        return "Raise engine.max_context, or let the agent and its environment send less"
    return FIX_HINTS[kind]


def commonest_message(failures: Sequence[Failure]) -> str:
    """The most frequent message, on one line."""
    ((message, _),) = Counter(failure.message for failure in failures).most_common(1)
    return one_line(message)


def one_line(message: str) -> str:
    """A message on one line, shortened to MAX_MESSAGE_CHARS characters."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]} ..."
