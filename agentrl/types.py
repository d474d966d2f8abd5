"""The nouns of the system, the same in Python, SQL, JSON, command line and documentation.

task -> group -> rollout -> attempt -> transition. Records are frozen and carry no behaviour beyond
arithmetic on their own fields; the store is the only place where they live.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

Json = Any  # the payload of a user: whatever JSON can say
Task = Mapping[str, Json]
"""JSON object. `input` goes to the agent, the whole object to the verifier; `id` is optional."""
SIDE = "side"  # role of calls beside the agent's own work, such as titles: no policy learns them
DIFF = "agentrl.diff"  # attribute of a span: what the agent changed in its workspace
POLICY = "policy"  # name of the trained policy of a run that has only one
EMPTY = "rollouts/empty"  # metric of a step without a usable rollout: how many it had
ENDED = "run/ended"  # metric of a run's last step: 1 once no rollout will be queued any more

if TYPE_CHECKING:
    Int32 = array[int]
    Float32 = array[float]
else:  # codecs must tell them apart, and before Python 3.12 `array[int]` fails at run time

    class Int32(array):
        """Token ids."""

        __slots__ = ()

    class Float32(array):
        """Log-probs."""

        __slots__ = ()


def int32(values: Any = ()) -> array[int]:
    """Token ids as they are stored: int32, contiguous. Raises OverflowError outside int32."""
    return array("i", values)


def float32(values: Any = ()) -> array[float]:
    """Log-probs as they are stored: float32, contiguous."""
    return array("f", values)


class Purpose(StrEnum):
    """Why a rollout was asked for. Evaluation rollouts are never trained on."""

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
    """Why an attempt failed. A failed rollout is data: it has no reward, never reward 0."""

    AGENT = "agent_error"
    TIMEOUT = "timeout"
    MODEL = "model_error"
    VERIFIER = "verifier_error"
    LIMIT = "limit"  # it used up agent.max_calls or agent.max_tokens
    NO_CALL = "no_model_call"
    WORKSPACE = "workspace_error"  # its files cannot be made or copied
    LOST_RUNNER = "lost_runner"
    CANCELLED = "cancelled"


class Scope(StrEnum):
    """What a reward row is about."""

    TRANSITION = "transition"
    ROLE = "role"
    ROLLOUT = "rollout"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all stored records."""


class Sampling(Record, frozen=True):
    """Sampling parameters. In a rollout: defaults for those that the agent does not set, and with
    `force` temperature, top_p and top_k whatever it sets."""

    temperature: float = 1.0  # 0: the likeliest token; training needs about 1
    top_p: float = 1.0  # share of the likeliest tokens that are drawn from; train with 1
    top_k: int = 0  # 0: no limit
    max_tokens: int | None = None  # of one call's answer; none: to the end of the context
    seed: int | None = None  # of sampling; each rollout of a run has another; none: every call
    force: bool = False  # over what the agent sets itself


class Branch(Record, frozen=True):
    """A rollout that goes its own way after the first `calls` transitions of another that ended.

    `without`: roles of which no call is repeated, because other policies play them here. Such a
    rollout shows how the other one would have ended without them, and is never trained on."""

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
    step: int = 0  # the training step that asked for it
    max_attempts: int = 3
    timeout: float = 60.0  # seconds for one attempt
    priority: int = 0  # larger is claimed first
    branch: Branch | None = None
    seats: dict[str, str] = {}  # role or policy -> policy that plays it here, not the run file's
    candidate: str | None = None  # whose texts the agent's roles read here; None: its own


class PromptText(Record, frozen=True):
    """What a role reads in the place of a text of the agent."""

    component: str
    role: str
    seed: str  # in its system or developer message, or in the description of `tool`; "": no text
    text: str
    tool: str = ""


class Attempt(Record, frozen=True):
    """One try at a rollout: a lease. `id` is the 32-hex-digit OpenTelemetry trace id."""

    id: str
    rollout: NewRollout
    fence: int  # 1 for the first attempt of a rollout; only the highest fence may write
    lease_until: float  # unix seconds
    ran: Json = None  # of an earlier attempt, whose trace is this one's now: only score it
    prompts: list[PromptText] = []  # those of the rollout's candidate


class Transition(Record, frozen=True):
    """One model call as an RL step: state = `prompt`, action = `completion`.

    `prompt` [P] and `completion` [C] are int32 token ids, `logprobs` [C] the sampler's own float32
    log-probs at `sampling.temperature`. `exact` is false when the upstream gave no token ids.
    `messages` and `tools` are what the agent sent, `answer` what it received (chat message), and
    `left_out` the options of its request that had no effect. A call that `repeats` another was
    answered from the record, not by the policy: it is context only.

    `version` is that of the first sampled token. `spans`, empty where one version sampled all,
    has the index of the first token of each version: `[(0, 7), (12, 8)]`.
    """

    id: str
    attempt: str
    index: int  # order of arrival within the attempt, from 0
    prompt: Int32
    completion: Int32
    logprobs: Float32
    role: str = "agent"
    policy: str = POLICY
    version: int | None = None
    sampling: Sampling = Sampling()
    finish: str = "stop"  # the API's finish_reason; "cut" where the agent stopped reading
    exact: bool = True
    messages: list[dict[str, Json]] = []
    tools: list[dict[str, Json]] = []
    answer: dict[str, Json] | None = None
    span: str | None = None  # parent span id of the request, 16 hex digits
    started: float = 0.0  # unix seconds
    seconds: float = 0.0
    repeats: str | None = None  # the call of another rollout that it replays
    left_out: list[str] = []  # fields and hosted tools
    spans: list[tuple[int, int]] = []  # versions ascend

    @property
    def versions(self) -> str:
        """The versions for a person to read, `v7` or `v7→v8@12`; empty if they are not known."""
        first = "" if self.version is None else f"v{self.version}"
        return first + "".join(f"→v{version}@{start}" for start, version in self.spans[1:])


class Reward(Record, frozen=True):
    """A number about a rollout, a role or a transition. A missing reward has no row."""

    value: float
    name: str = "outcome"
    scope: Scope = Scope.ROLLOUT
    target: str | None = None  # role name or transition id, by scope
    source: str = "verifier"
    note: str = ""  # why, in the verifier's words


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
    """The failed attempts of a run that are of one kind: their number, and the last of them."""

    kind: ErrorKind
    attempts: int
    rollout: str
    message: str


class Outcome(Record, frozen=True):
    """How an attempt ended. Exactly one of `failure` (failed) or none (succeeded)."""

    attempt: str
    fence: int
    result: Json = None
    rewards: list[Reward] = []
    spans: list[Span] = []
    failure: Failure | None = None
    retry: bool = False  # try again with the next fence while attempts are left
    ran: Json = None  # it has not ended: its agent has, and did this, which is still to be scored


class Rollout(Record, frozen=True):
    """A rollout as it is in the store now; `attempt` is the last one, which counts."""

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
        """Rollout-scope reward of that name; NaN when missing."""
        rows = (row for row in self.rewards if row.scope is Scope.ROLLOUT and row.name == name)
        return next((row.value for row in rows), float("nan"))

    @property
    def counterfactual(self) -> bool:
        """Whether it replays another rollout without some roles."""
        return self.branch is not None and bool(self.branch.without)


class Group(Record, frozen=True):
    """The rollouts of one task that are compared with each other, all of them terminal."""

    id: str
    run: str
    step: int
    rollouts: list[Rollout]


class PolicyVersion(Record, frozen=True):
    """The server of a policy at present. The gateway reads this to route a call."""

    run: str
    policy: str
    version: int
    base_url: str  # ends in /v1
    model: str  # the name the server answers to


class Credit(Record, frozen=True):
    """The credit of one call in a training step: arrays of one number for each completion token, or
    a single one where all are equal. NaN = missing."""

    transition: str
    policy: str
    advantage: Float32  # NaN: not in the loss
    baseline: Float32  # the algorithm's baselines and reward penalties, one after the other
    gate: Float32  # product of the gates' factors
    weight: Float32  # share of the loss
    psi: Float32  # coefficient of the log-prob's gradient


class StepReward(Record, frozen=True):
    """A reward that a training step gave to one of its rollouts, or to a call or role of one."""

    rollout: str
    reward: Reward


class StepCommit(Record, frozen=True):
    """All results of one training step, stored in one transaction."""

    run: str
    epoch: int
    step: int
    groups: list[str]
    versions: dict[str, int]
    checkpoint: str | None  # none: the one before it stays, for nothing was learned
    metrics: dict[str, float]
    discarded: list[str] = []  # groups that are settled by this step without being trained
    credits: list[Credit] = []  # of calls of `groups`
    rewards: list[StepReward] = []  # of rollouts of `groups`


class RunState(Record, frozen=True):
    """The state from which a restarted algorithm continues exactly after its last commit."""

    run: str
    epoch: int  # grows with every open_run; older epochs are fenced
    step: int  # the next step to train; 0 for a new run
    checkpoint: str | None
    config: dict[str, Json]
    created: float = 0.0  # unix seconds

    @property
    def identity(self) -> str:
        """Tells this run from earlier ones of the same name."""
        return f"{self.run}@{self.created}"


class StepRow(Record, frozen=True):
    """A committed step (or a logged evaluation) with its metrics."""

    run: str
    step: int
    metrics: dict[str, float]
    committed: bool
    at: float


class Counts(Record, frozen=True):
    """Rollouts of one run by state, and groups by whether they are trained."""

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
    inexact: int = 0  # of the transitions: those without token ids
    tokens: int = 0  # completion tokens


class Trace(Record, frozen=True):
    """All that is stored of one attempt."""

    rollout: Rollout
    attempt: str
    transitions: list[Transition]
    spans: list[Span]
