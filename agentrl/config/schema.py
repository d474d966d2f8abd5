"""The tables of the run file: every setting with its type, its default and what it means.

Types refuse impossible numbers, `__post_init__` refuses contradictions within a table, and
`validate` checks settings of several tables together. Settings that do not change what a run learns
are in `infrastructure`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from agentrl.config.agents import AgentConfig, RoleRule, WorkspaceConfig
from agentrl.config.base import (
    Count,
    Name,
    Natural,
    NonNegative,
    Positive,
    Seconds,
    Section,
)
from agentrl.config.infrastructure import (
    EmbeddedEngineConfig,
    Engine,
    Learner,
    Runner,
    RunnerConfig,
    SessionsConfig,
    TorchLearnerConfig,
)
from agentrl.config.opponents import Selfplay, SelfplayConfig
from agentrl.config.prompts import PromptsConfig
from agentrl.config.rewards import Judge, RewardModel, RewardModelTraining
from agentrl.team_rewards import EXACT
from agentrl.types import Sampling

MODEL_LR = 1e-5  # default learning rate of a critic that is a model of its own


class TasksConfig(Section, frozen=True):
    """Each is a "file.jsonl", a "file.py:name": an iterable of tasks, such as a data set, or a
    function for one, or a data set of the hub, "hf:owner/name[/config][@revision][:split]",
    whose column input, prompt, question, problem or instruction is the input."""

    train: str = ""  # that the policy learns from
    heldout: str = ""  # that it is only scored on; 50 or more make a curve worth reading
    # Of training: each task once an epoch, or drawn by its success rate, most often tasks that are
    # solved half of the time. Outcomes must be from 0 to 1 for this.
    order: Literal["shuffle", "difficulty"] = "shuffle"
    # Mean outcome from which a task is drawn no more (ScaleRL, arXiv 2510.13786).
    solved: Positive | None = None  # none: every task is drawn again


class VerifierConfig(Section, frozen=True):
    """What scores rollouts."""

    path: str = ""  # "file.py:name"
    rewards: dict[str, str] = {}  # more rewards: name -> "file.py:name" or an entry point


class LoraConfig(Section, frozen=True):
    """Train a low-rank adapter instead of the model. The default scale is that of
    thinkingmachines.ai/blog/lora, with which the best learning rate does not depend on the rank."""

    rank: Natural = 0  # 0: no adapter, all weights are trained
    alpha: Positive = 32.0  # what the adapter adds is scaled by alpha / rank
    targets: list[str] = []  # names of linear layers, such as "q_proj"; default: all but the head
    adapter: str = ""  # directory of an adapter to start from; default: one that changes nothing


class PolicyConfig(Section, frozen=True):
    """The model to train: a Hugging Face checkpoint directory or hub name."""

    model: str = ""  # default with `build`: <output>/policy
    build: str = ""  # "file.py:name": called as (directory, seed) to make `model` if it is absent
    # of weights and computation; bfloat16 takes half the memory, on GPUs
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Weights under an adapter (policy.lora) in 4 or 8 bits each, by bitsandbytes; none: in `dtype`.
    quantize: Literal["", "4bit", "8bit"] = ""
    device: str = "auto"  # "cpu", "cuda" or "cuda:1"; auto: the GPU if there is one
    # Its chat template may leave out messages of some roles. adapt: they are sent in roles that it
    # shows, and a call of which it would lose text is refused. as_sent: the template decides.
    messages: Literal["adapt", "as_sent"] = "adapt"
    lora: LoraConfig = LoraConfig()


class WarmupConfig(Section, frozen=True):
    """Supervised fine-tuning of all weights of the policy before the run's first step."""

    data: str = ""  # "file.jsonl" or "file.py:name": {"messages": [...], "tools": [...]}; none: no
    steps: Count = 100  # optimizer steps
    batch: Count = 16  # conversations in an optimizer step, drawn at random
    lr: Positive = 1e-5  # after a linear rise over a tenth of the steps it falls linearly to 0


class MemberConfig(Section, frozen=True):
    """One of several policies: its roles, its weights, and what differs from the run's tables."""

    roles: list[str] = []  # whose calls it answers and learns from
    model: str = ""  # weights of its own; default: an adapter on those of policy.model
    lora: dict[str, Any] = {}  # what differs from policy.lora
    frozen: bool = False  # served from `model` or `lora.adapter` and never trained
    algorithm: dict[str, Any] = {}  # what differs from [algorithm], such as its preset or lr
    critic: dict[str, Any] = {}  # what differs from [critic]
    reference: dict[str, Any] = {}  # what differs from [reference]
    teacher: dict[str, Any] = {}  # what differs from [teacher]


class TeamConfig(Section, frozen=True):
    """Which of several policies learn in a step.

    together: all of them. alternating: in turn, in the order of the run file. sequence: the same,
    but each has only one turn, and the last one's lasts to the end."""

    # who learns in a step: all, or one after the other
    schedule: Literal["together", "alternating", "sequence"] = "together"
    every: Count = 1  # steps of a policy before the next one's turn


class BranchingConfig(Section, frozen=True):
    """More rollouts for a group, queued when its own have ended. Each repeats the first calls of an
    earlier one and is sampled from there.

    mc: from the state before each call of every rollout. tree: from the calls of the group where
    the policy is least certain."""

    kind: Literal["none", "mc", "tree"] = "none"  # which calls are continued otherwise
    width: Count = 1  # branches from each call
    calls: Natural = 0  # the most calls, least certain first: of a rollout (mc; 0: all), of a group

    def __post_init__(self) -> None:
        if self.kind == "none" and (self.width, self.calls) != (1, 0):
            raise ValueError("width and calls mean nothing without kind = 'mc' or 'tree'")
        if self.kind == "tree" and not self.calls:
            raise ValueError("kind = 'tree' needs to know from how many `calls` of a group")


class CounterfactualConfig(Section, frozen=True):
    """Replays of rollouts with other policies in some roles, queued when the rollouts have ended.
    They measure the contribution of a role: see `algorithms.multiagent.counterfactuals`."""

    # Role -> who plays it instead: a policy or an upstream, or "first": the role's own policy as
    # training began with it. The contributions of these roles are measured.
    stand_ins: dict[str, str] = {}
    # The reward of a role: the team's value less that of the team without the role, or the mean of
    # what the role adds to coalitions of the others.
    value: Literal["difference", "shapley"] = "difference"
    orders: Natural = 0  # orders of joining to draw, for Shapley values of more than 4 roles
    width: Count = 1  # replays of each coalition, whose mean is its value

    def __post_init__(self) -> None:
        if not self.stand_ins and (self.value, self.orders, self.width) != ("difference", 0, 1):
            raise ValueError("value, orders and width mean nothing without stand_ins")
        many = self.value == "shapley" and len(self.stand_ins) > EXACT
        if many and not self.orders:
            raise ValueError(
                f"{len(self.stand_ins)} roles can join in too many orders to take them all; set "
                "how many `orders` are drawn"
            )
        if self.orders and not many:
            raise ValueError(f"orders are for Shapley values of more than {EXACT} roles")


class AlgorithmConfig(Section, frozen=True):
    """How a policy learns from a batch. `options` are arguments of the preset."""

    # a name of `agentrl algorithms`, with modifiers as in "grpo+tis", or your own "file.py:name"
    preset: str = "grpo"
    # arguments of the preset: `agentrl algorithms show NAME` lists them
    options: dict[str, Any] = {}
    groups: Count = 8  # per step
    group_size: Count = 8  # rollouts of each task, which are compared with each other
    min_group: Count = 2  # valid rollouts below which a group is dropped
    inexact: Literal["refuse", "retokenize"] = "refuse"  # calls whose token ids are unknown
    # No token is trained that is older than this many updates of its policy, rounded up. Groups are
    # asked for as early as this allows: 0.5 lets half a step be sampled ahead.
    max_staleness: NonNegative = 0.0  # 0: sampling waits for every update
    # While weights are updated. drained: calls in flight end first, and new ones wait. in_flight:
    # calls go on, with the new weights from then on. one_step_off: they go on with the old ones,
    # and the update waits until all groups of the next step have ended, so that a run can be
    # repeated: the same tokens, and log-probs equal to rounding. None without max_staleness, else
    # drained.
    overlap: Literal["none", "drained", "in_flight", "one_step_off"] | None = None
    order: Literal["asked", "ready"] = "asked"  # groups train as asked for, or as they end
    # With order = "ready", of tokens that got too old: keep the reward for the group's baseline and
    # learn nothing from the tokens, or cancel the whole group and ask for another.
    stale: Literal["withhold", "cancel"] = "withhold"
    close_at: Count | None = None  # successful rollouts that end their group; none: group_size
    # Seconds after a group's first rollout was claimed; then min_group successful ones end it.
    group_deadline: Seconds | None = None
    dynamic_sampling: bool | None = None  # replace groups of equal reward; none: as the preset does
    max_rounds: Count | None = None  # of replacing; then the step has fewer groups. Default 10
    store_credit: bool = True  # advantages, baselines and gates with each step, for `explain`
    minibatches: Count = 1  # optimizer steps a batch is split into
    epochs: Count = 1  # passes over a batch
    lr: Positive = 1e-6  # peak learning rate; about ten times as high for an adapter
    # Effective sample size of the weights against the sampler, as a share of the tokens, below
    # which lr falls in proportion (VCPO, arXiv 2602.17616); costs a forward of the batch.
    lr_ess: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None  # none: lr does not fall
    warmup: Natural = 0  # steps of linear learning-rate warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after it
    min_lr: NonNegative = 0.0  # at the end of a linear or cosine schedule
    target_kl: Positive | None = None  # nats: a batch that moved the policy further is left early
    max_bad_steps: Count = 3  # optimizer steps in a row that are not finite, until the run ends
    weight_decay: NonNegative = 0.0  # of AdamW, per step and unit of lr
    max_grad_norm: Positive = 1.0  # longer gradients are shortened to it
    branching: BranchingConfig = BranchingConfig()
    counterfactual: CounterfactualConfig = CounterfactualConfig()

    @property
    def samples_during_update(self) -> bool:
        """Whether the sampler has a copy of the weights, and goes on while they are updated."""
        return self.overlap in ("in_flight", "one_step_off")


class DataConfig(Section, frozen=True):
    """A data set of the store to learn from, in place of agent, tasks and verifier: see
    `agentrl data`. A step learns from `algorithm.groups` of its items."""

    name: str = ""  # of the data set; empty: the run learns from rollouts
    version: Natural = 0  # 0: the newest when the run begins
    split: str = "train"  # of items to learn from
    heldout: str = "test"  # of items on which the loss is measured, by [eval]


class CriticConfig(Section, frozen=True):
    """The value model of presets such as ppo."""

    # "shared": a head on the policy's hidden states; "copy": a model of its own that begins as the
    # policy did; or a checkpoint directory or hub name of one with its vocabulary. Empty: none.
    model: str = ""
    # Constant learning rate, of a shared critic that of its head, which begins at 0. None: for a
    # head 0.05 / hidden size, so that values move as fast in any model; for a model 1e-5.
    lr: Positive | None = None
    coefficient: Positive = 0.5  # of the value loss in the policy's loss, for a shared critic
    clip: Positive = 0.2  # how far a value may move in one step, value clipping; inf: any
    weight_decay: NonNegative = 0.0  # of AdamW, for a critic that is a model of its own


class ReferenceConfig(Section, frozen=True):
    """The reference policy of KL penalties."""

    # A checkpoint directory or hub name; empty: the initial policy or, for an adapter, its model.
    model: str = ""
    every: Natural = 0  # steps after which the current policy becomes the reference; 0: never
    target: NonNegative = 0.0  # nats per token: adapts the penalty to keep their KL there; 0: fixed
    horizon: Count = 10_000  # rollouts over which it adapts


class TeacherConfig(Section, frozen=True):
    """The model that `distill` and `+distill` imitate: in memory, or behind vLLM."""

    model: str = ""  # a checkpoint directory or hub name with the policy's vocabulary
    # Of [upstreams], in place of a model: a vLLM server, or another that answers `prompt_logprobs`,
    # with the policy's vocabulary. Its log-probs are those at temperature 1.
    upstream: str = ""
    concurrency: Count = 8  # rows of a batch that the upstream reads at a time

    def __post_init__(self) -> None:
        if self.model and self.upstream:
            raise ValueError("give a model or an upstream, not both")


class UpstreamConfig(Section, frozen=True):
    """An endpoint that answers calls and is not trained, such as a judge, an opponent or a tool's
    model; or one `text` that is the answer to every call."""

    base_url: Annotated[str, msgspec.Meta(pattern=r"^(https?://.*)?$")] = ""  # ends in /v1
    model: str = ""  # the name it answers to; empty: the one the agent asks for
    key_env: str = ""  # environment variable of the runner that holds its API key
    text: str | None = None  # the answer to every call, in place of an endpoint

    def __post_init__(self) -> None:
        if (self.text is None) != bool(self.base_url):
            raise ValueError("give either its base_url or the text that is its answer")
        if self.text is not None and (self.model or self.key_env):
            raise ValueError("model and key_env are of a base_url, and text is the answer itself")


class EvalConfig(Section, frozen=True):
    """Held-out evaluations before and after training, and every so many steps between."""

    every: Natural = 0  # steps; 0: only before and after
    tasks: Natural = 0  # before and after; 0: all held-out tasks
    curve_tasks: Natural = 64  # in the evaluations between; 0: all
    sampled: bool = True  # before and after, also at temperature 1
    temperature: NonNegative = 0.0  # everything else is sampled as in training
    # Of each task before and after, at temperature 1; more than 1 also gives pass@k.
    samples: Count = 1
    threshold: float = 0.5  # reward from which a sample counts as solved, for pass@k
    # Each "file.py:name", called with a checkpoint's directory: a number, or several by name.
    functions: list[str] = []
    # Score copies of the policies, each as large as the model, while training goes on; not before
    # and after it.
    beside: bool = False
    patience: Natural = 0  # evaluations without a better score until training ends; 0: it goes on


class MetricsConfig(Section, frozen=True):
    """Where metrics go besides the store. Each sink is an extra: `pip install 'agentrl[wandb]'`."""

    sinks: list[str] = []  # tensorboard, wandb, mlflow, trackio, or your own as "file.py:name"
    options: dict[str, Any] = {}  # any keys, for sinks of your own
    project: Annotated[str, msgspec.Meta(min_length=1)] = "agentrl"  # of a sink; MLflow: experiment


class RunConfig(Section, frozen=True):
    """One training job. Files are looked up in `root`, the run file's folder; what the run writes
    goes to `output`, relative to the working directory."""

    name: Name = "run"  # of the run, in the store and in what is printed
    root: str = "."  # folder of the files that the run file names; default: its own
    output: str = ""  # folder of store, checkpoints and figures; default runs/<name>
    store: str = ""  # store URL; default: SQLite in the output folder
    seed: Natural = 0  # of the model's building, the order of tasks, and sampling
    steps: Natural = 100  # updates of the policy; 0: only evaluate
    keep_checkpoints: Count = 2  # the newest on disk, beside the best; older ones are deleted
    max_empty_steps: Count = 3  # steps in a row without one usable rollout, until the run ends
    agent: AgentConfig = AgentConfig()
    workspace: WorkspaceConfig = WorkspaceConfig()
    tasks: TasksConfig = TasksConfig()
    data: DataConfig = DataConfig()
    verifier: VerifierConfig = VerifierConfig()
    policy: PolicyConfig = PolicyConfig()
    warmup: WarmupConfig = WarmupConfig()
    policies: dict[str, MemberConfig] = {}  # by name; none: one, of the name "policy"
    team: TeamConfig = TeamConfig()
    sampling: Sampling = Sampling()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    reward_model: RewardModelTraining = RewardModelTraining()
    reward_models: dict[Name, RewardModel] = {}  # by the name of their reward
    judges: dict[Name, Judge] = {}  # by the name of their reward
    learner: Learner = TorchLearnerConfig()
    engine: Engine = EmbeddedEngineConfig()
    runner: Runner = RunnerConfig()
    eval: EvalConfig = EvalConfig()
    selfplay: Selfplay = SelfplayConfig()
    metrics: MetricsConfig = MetricsConfig()
    prompts: PromptsConfig = PromptsConfig()
    upstreams: dict[Name, UpstreamConfig] = {}  # by name, which is a model name for the agent too
    roles: dict[str, str] = {}  # role -> the upstream or policy that answers it
    sessions: SessionsConfig = SessionsConfig()
    # [[roles.match]] in the run file: roles of calls that say none themselves. The first that holds
    # counts; those of the harness come after.
    role_rules: list[RoleRule] = []

    def path(self, name: str) -> Path:
        """A file named in the run file, relative to its folder."""
        return Path(self.root, name)

    def model_source(self, name: str) -> str:
        """The directory of a model, relative to the run file's folder, or its hub name."""
        directory = self.path(name)
        return str(directory) if directory.is_dir() else name

    def model_path(self) -> str:
        """The policy's model: a directory, which `policy.build` or the warm-up may have made, or a
        hub name."""
        warmed = Path(self.output, "warmup")
        if self.warmup.data and warmed.is_dir():
            return str(warmed)
        own = self.path(self.policy.model) if self.policy.model else Path(self.output, "policy")
        return str(own) if own.is_dir() else self.policy.model

    def checkpoint(self, name: str) -> Path:
        """The directory of a checkpoint by its name in the store, relative to `output`. Earlier
        versions stored absolute paths, and the folder may have been moved or copied since."""
        own = Path(self.output, "checkpoints", Path(name).name)
        return own if own.is_dir() else Path(self.output, name)
