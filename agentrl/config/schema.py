"""The tables of the run file: every setting with its type, its default and its meaning.

Types refuse impossible numbers, `__post_init__` refuses contradictions within a table, and
`validate` checks settings of several tables together. `infrastructure` has the settings that do not
change what a run learns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from agentrl.base.parts import missing
from agentrl.config.agents import AgentConfig, RoleRule, UpstreamConfig
from agentrl.config.base import (
    Count,
    Joining,
    Name,
    Natural,
    NonNegative,
    Positive,
    Seconds,
    Section,
    kinds,
    tables,
    with_parts,
)
from agentrl.config.infrastructure import (
    OWN_ENGINES,
    OWN_LEARNERS,
    OWN_RUNNERS,
    EmbeddedEngineConfig,
    EngineConfig,
    LearnerConfig,
    RunnerConfig,
    TorchLearnerConfig,
)
from agentrl.errors import nearest
from agentrl.types import Sampling

MODEL_LR = 1e-5  # default learning rate of a critic that is a model of its own

if TYPE_CHECKING:
    Learner = LearnerConfig
    Engine = EngineConfig
    Runner = RunnerConfig
else:
    Learner = kinds("learner", *OWN_LEARNERS)
    Engine = kinds("engine", *OWN_ENGINES)
    Runner = kinds("runner", *OWN_RUNNERS)


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
    order: Literal["shuffle", "difficulty"] = "shuffle"
    # Mean outcome at which a task is dropped (ScaleRL, arXiv 2510.13786).
    solved: Positive | None = None  # none: never

    def problems(self, config: Any) -> Iterator[str]:
        by_order, why = self.order == "difficulty", missing("training", "tasks.order")
        if why and (by_order or self.solved is not None):
            yield f"tasks.{'order' if by_order else 'solved'}: {why}"
        if by_order and self.solved is not None:
            yield "tasks.solved leaves out tasks that order = 'difficulty' draws rarely; choose one"


class VerifierConfig(Section, frozen=True):
    """The functions that score rollouts."""

    path: str = ""  # Function that scores a rollout, as "file.py:name".
    rewards: dict[str, str] = {}  # additional rewards: name -> "file.py:name" or an entry point
    # Lowest and highest outcome; with another one a rollout has failed. none: any number.
    range: tuple[float, float] | None = None

    def problems(self, config: Any) -> Iterator[str]:
        if self.range is not None and not self.range[0] < self.range[1]:
            yield f"verifier.range = {list(self.range)}: write the lowest outcome and the highest"


class LoraConfig(Section, frozen=True):
    """Train a low-rank adapter instead of the model. With the default scale, from
    thinkingmachines.ai/blog/lora, the best learning rate does not depend on the rank."""

    rank: Natural = 0  # Rank of the adapter; 0: none, train all weights.
    alpha: Positive = 32.0  # Scale of the adapter: its output is multiplied by alpha / rank.
    # Names of linear layers or experts, such as "q_proj"; default: all but the head and routers.
    targets: list[str] = []
    adapter: str = ""  # directory of an adapter to start from; default: one that changes nothing


class PolicyConfig(Section, frozen=True):
    """The model to train: a Hugging Face checkpoint directory or hub name."""

    model: str = ""  # Hub name or directory of the model; default with `build`: <output>/policy.
    # Function that creates `model` if it is absent, called as (directory, seed): "file.py:name".
    build: str = ""
    # Number type of weights and computation; bfloat16 takes half the memory, on GPUs.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Quantize the weights under an adapter (policy.lora) with bitsandbytes; none: keep `dtype`.
    quantize: Literal["", "4bit", "8bit"] = ""
    device: str = "auto"  # Device: "cpu", "cuda" or "cuda:1"; auto: the GPU if there is one.
    # A chat template may drop messages of some roles. adapt: give them roles that the template
    # renders, and refuse a call whose text would still be lost. as_sent: leave it to the template.
    unsupported_roles: Literal["adapt", "as_sent"] = "adapt"
    lora: LoraConfig = LoraConfig()


class MemberConfig(Section, frozen=True):
    """One of several policies: its roles, its weights, and its overrides of the run's tables."""

    roles: list[str] = []  # roles whose calls it answers and learns from
    model: str = ""  # Weights of its own; default: an adapter on policy.model.
    lora: dict[str, Any] = {}  # overrides of policy.lora
    frozen: bool = False  # Whether `model` or `lora.adapter` is served without training.
    algorithm: dict[str, Any] = {}  # overrides of [algorithm], such as preset or lr
    critic: dict[str, Any] = {}  # overrides of [critic]
    reference: dict[str, Any] = {}  # overrides of [reference]
    teacher: dict[str, Any] = {}  # overrides of [teacher]


if not TYPE_CHECKING:
    PolicyConfig = with_parts(PolicyConfig, "policy")
    MemberConfig = with_parts(MemberConfig, "policy")


class TeamConfig(Section, frozen=True):
    """Which of several policies learn in a step.

    together: all of them. alternating: in turn, in the order of the run file. sequence: the same,
    but each policy has only one turn, and the last policy's turn lasts to the end."""

    # the policies that learn in a step: all, or one after the other
    schedule: Literal["together", "alternating", "sequence"] = "together"
    every: Count = 1  # steps of each turn


class AlgorithmConfig(Section, frozen=True):
    """How a policy learns from a batch. `options` are arguments of the preset."""

    # Name from `agentrl algorithms`, with modifiers as in "grpo+tis", or your own "file.py:name".
    preset: str = "auto"
    # arguments of the preset: `agentrl algorithms show NAME` lists them
    options: dict[str, Any] = {}
    groups: Count = 8  # Groups of rollouts per step, one for each task.
    group_size: Count = 8  # rollouts per task, which are compared with each other
    min_group: Count = 2  # Valid rollouts below which a group is dropped.
    # Calls answered without token ids are not trained, or get those that their text usually has.
    missing_token_ids: Literal["refuse", "retokenize"] = "refuse"
    # How many updates old a sample may be, rounded up. The higher, the less sampling waits for
    # training; 0.5 lets half a step be sampled ahead.
    max_staleness: NonNegative = 0.0  # 0: sampling waits for every update
    # Sampling during updates. drained: calls in flight end first, and new ones wait. in_flight:
    # calls continue, with the new weights as soon as they arrive. one_step_off: calls continue with
    # the old weights, and the update waits until all groups of the next step have ended, which
    # makes a run repeatable: the same tokens, and log-probs equal up to rounding. Default: none
    # without max_staleness, else drained.
    async_sampling: Literal["none", "drained", "in_flight", "one_step_off"] | None = None
    # Order in which groups are trained: as requested, or as they end.
    group_order: Literal["asked", "ready"] = "asked"
    # Too old tokens with group_order = "ready". withhold: use the reward for the group's baseline
    # but do not train the tokens. cancel: cancel the whole group and request another.
    stale_tokens: Literal["withhold", "cancel"] = "withhold"
    group_quorum: Count | None = None  # successful rollouts that end their group; none: group_size
    # Seconds after the first claim in a group, from which min_group successful rollouts end it.
    group_deadline: Seconds | None = None
    # Whether groups of equal reward are replaced; none: preset's default (only dapo does). That
    # keeps steps equally large, for as many rollouts per group that has a gradient.
    dynamic_sampling: bool | None = None
    # Rounds of replacement, after which a step has fewer groups; none: 10.
    max_rounds: Count | None = None
    # Whether advantages, baselines and gates of each step are stored, for `explain`.
    store_credit: bool = True
    minibatches: Count = 1  # optimizer steps per pass over a batch
    epochs: Count = 1  # passes over a batch
    lr: Positive = 1e-6  # peak learning rate; for an adapter about 2e-4
    # If the effective sample size of the importance weights, as a fraction of the tokens, is below
    # this, lr falls in proportion (VCPO, arXiv 2602.17616); costs a forward pass of the batch.
    ess_for_full_lr: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None  # none: off
    warmup: Natural = 0  # steps of linear learning-rate warm-up
    # Learning rate after the warm-up.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: NonNegative = 0.0  # Learning rate at the end of a linear or cosine schedule.
    # Nats per token: an update that moves the policy further is undone, and made again with half
    # the learning rate, until it does not. Default, wherever the learner can undo an update: 0.05
    # for each of its optimizer steps, or target_kl if that is larger. While recent updates move the
    # policy by more than a tenth of it, the learning rate is lowered. 0: neither.
    max_kl: NonNegative | None = None
    # KL in nats of the policy from that of the batch's start, above which the batch ends early.
    target_kl: Positive | None = None
    max_bad_steps: Count = 3  # non-finite optimizer steps in a row that end the run
    weight_decay: NonNegative = 0.0  # decay of AdamW, per step and unit of lr
    max_grad_norm: Positive = 1.0  # Norm to which gradients are clipped.

    @property
    def samples_during_update(self) -> bool:
        """Whether the sampler has its own copy of the weights and continues during updates."""
        return self.async_sampling in ("in_flight", "one_step_off")

    @property
    def joining(self) -> list[Joining]:
        """The tables of parts by which more rollouts join a group when its own have ended."""
        every = (getattr(self, name) for name in self.__struct_fields__)
        return [table for table in every if isinstance(table, Joining) and table.joins]

    @property
    def trains_joined(self) -> bool:
        """Whether more than `group_size` rollouts of a group may be trained."""
        return any(table.trains for table in self.joining)


if not TYPE_CHECKING:
    AlgorithmConfig = with_parts(AlgorithmConfig, "algorithm")


class CriticConfig(Section, frozen=True):
    """The value model of presets such as ppo."""

    # Value model. "shared": a head on the policy's hidden states; "copy": a separate model that
    # starts as the policy; or a checkpoint directory or hub name of a model with its vocabulary.
    # Empty: none.
    model: str = ""
    # Constant learning rate of the model, or of a shared critic's head, which starts at 0. None:
    # 0.05 / hidden size for a head (so values move equally fast in any model), 1e-5 for a model.
    lr: Positive | None = None
    # Coefficient of the value loss in the policy's loss, for a shared critic.
    coefficient: Positive = 0.5
    clip: Positive = 0.2  # value clipping: largest change of a value in one step; inf: off
    weight_decay: NonNegative = 0.0  # Weight decay of AdamW, for a separate model.


class ReferenceConfig(Section, frozen=True):
    """The reference policy of KL penalties."""

    # A checkpoint directory or hub name; empty: the initial policy or, for an adapter, its base.
    model: str = ""
    every: Natural = 0  # steps between resets of the reference to the current policy; 0: never
    # KL in nats per token to which the penalty's coefficient adapts; 0: fixed coefficient.
    target_kl: NonNegative = 0.0
    kl_horizon: Count = 10_000  # rollouts over which the penalty adapts

    def problems(self, config: Any) -> Iterator[str]:
        if self.target_kl and (why := missing("training", "reference.target_kl")):
            yield f"reference.target_kl: {why}"


class TeacherConfig(Section, frozen=True):
    """The model that `distill` and `+distill` imitate: in memory or served by vLLM."""

    model: str = ""  # a checkpoint directory or hub name with the policy's vocabulary
    # Instead of a model, one of [upstreams]: vLLM or another server with `prompt_logprobs` and the
    # policy's vocabulary. Its log-probs are at temperature 1.
    upstream: str = ""
    concurrency: Count = 8  # rows of a batch that the upstream reads concurrently

    def __post_init__(self) -> None:
        if self.model and self.upstream:
            raise ValueError("give a model or an upstream, not both")

    def problems(self, config: Any) -> Iterator[str]:
        if not self.upstream:
            return
        if why := missing("training", "teacher.upstream"):
            yield f"teacher.upstream: {why}"
        if self.upstream not in config.endpoints:
            known = nearest(self.upstream, config.endpoints)
            yield f"teacher.upstream = {self.upstream!r}; {known}"
        if config.sampling.temperature not in (0, 1):
            yield "sampling.temperature: teacher.upstream returns log-probs at 1; set it to 1"


class CheckpointConfig(Section, frozen=True):
    """Checkpoints during training, besides those of evaluations and of the last step."""

    # Steps between checkpoints, which is the most that a killed run trains again. 0: each step, or
    # if a checkpoint has more than 32 MiB, so seldom that they take 5 % of the time.
    every: Natural = 0


class EvalConfig(Section, frozen=True):
    """Held-out evaluations before, during and after training."""

    # Steps between evaluations; 0: only before and after training, as one of 64 tasks plays as many
    # rollouts as a step of 8 groups of 8.
    every: Natural = 0
    tasks: Natural = 0  # number of tasks before and after training; 0: all held-out tasks
    curve_tasks: Natural = 64  # number of tasks during training; 0: all
    # Whether evaluations before and after training also sample at temperature 1.
    sampled: bool = True
    # Temperature of evaluations; other sampling parameters are those of training.
    temperature: NonNegative = 0.0
    # Rollouts per task before and after training, at temperature 1; more than 1 also give pass@k.
    samples: Count = 1
    threshold: float = 0.5  # smallest reward of a solved sample, for pass@k
    # Functions of a checkpoint's directory as "file.py:name", which return a number or a dict.
    functions: list[str] = []
    # Whether evaluations during training use copies of the policies, each as large as the model,
    # and do not wait.
    concurrent: bool = False
    patience: Natural = 0  # evaluations without a better score that end training; 0: off

    def problems(self, config: Any) -> Iterator[str]:
        if self.functions and (why := missing("training", "eval.functions")):
            yield f"eval.functions: {why}"


class RunConfig(Section, frozen=True):
    """One training job. Paths of input files are relative to `root`, the run file's folder; outputs
    go to `output`, relative to the working directory."""

    name: Name = "run"  # Name of the run, in the store and in messages.
    file: str = ""  # The run file, if its run has the name of its folder; set by agentrl.
    root: str = "."  # folder of the files that the run file names; default: the run file's
    output: str = ""  # folder of store, checkpoints and figures; default runs/<name>
    store: str = ""  # store URL; default: SQLite in the output folder
    # Seed of policy.build, the order of tasks, and sampling. vLLM samples with it only if
    # algorithm.async_sampling = "one_step_off" or sampling.seed is set.
    seed: Natural = 0
    steps: Natural = 100  # updates of the policy; 0: only evaluate
    keep_checkpoints: Count = 2  # newest checkpoints to keep, besides the best one
    max_empty_steps: Count = 3  # steps in a row without a usable rollout that end the run
    # Share of a step's rollouts that may fail for one cause; with more the run ends and names it.
    # Those that have a reward, or that reached agent.max_calls or max_tokens, do not count.
    max_failed: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    agent: AgentConfig = AgentConfig()
    tasks: TasksConfig = TasksConfig()
    verifier: VerifierConfig = VerifierConfig()
    policy: PolicyConfig = PolicyConfig()
    policies: dict[str, MemberConfig] = {}  # Policies by name; none: one, named "policy".
    team: TeamConfig = TeamConfig()
    sampling: Sampling = Sampling()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    learner: Learner = TorchLearnerConfig()
    engine: Engine = EmbeddedEngineConfig()
    runner: Runner = RunnerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    # Models that are not trained, by name, which agents may use as a model name.
    upstreams: dict[Name, UpstreamConfig] = {}
    # Who answers each role's calls, an upstream or a policy; "*": the upstream that answers all
    # others, in a run without a policy.
    roles: dict[str, str] = {}
    # [[roles.match]] in the run file: rules for the roles of calls without one. The first matching
    # rule counts; the harness's own rules come last.
    role_rules: list[RoleRule] = []

    @property
    def endpoints(self) -> set[str]:
        """The upstreams that are servers."""
        return {name for name, upstream in self.upstreams.items() if upstream.text is None}

    @property
    def plays_rollouts(self) -> bool:
        """Whether it learns from rollouts of an agent, and not from what a part has instead."""
        return not any(table.replaces_rollouts for _, table in tables(self))

    @property
    def initial_policy(self) -> PolicyConfig:
        """[policy] with the weights that the first step trains, which a part may have made."""
        policy = self.policy
        for _, table in tables(self):
            policy = table.initial(self, policy)
        return policy

    def path(self, name: str) -> Path:
        """The path of a file named in the run file, relative to its folder."""
        return Path(self.root, name)

    def model_source(self, name: str) -> str:
        """The directory of a model, relative to the run file's folder, or its hub name."""
        directory = self.path(name)
        return str(directory) if directory.is_dir() else name

    def model_path(self) -> str:
        """The policy's model: a hub name or a directory, also of `policy.build` or of a part."""
        name = self.initial_policy.model
        own = self.path(name) if name else Path(self.output, "policy")
        return str(own) if own.is_dir() else name

    def checkpoint_path(self, name: str) -> Path:
        """The directory of a checkpoint by its name in the store, relative to `output`."""
        return Path(self.output, name)


if not TYPE_CHECKING:
    RunConfig = with_parts(RunConfig)
