"""The run file: every table, and every setting with its type, its default and its meaning.

The tables are in `agents`, `learning`, `rewards`, `infrastructure` and `live`. Types reject
impossible numbers, `__post_init__` rejects contradictions within a table, and `problems` those
between a table and others; `validate` checks what no table can say by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl.core.config.agents import (
    AgentConfig,
    AuditConfig,
    RoleRule,
    SessionsConfig,
    TasksConfig,
    UpstreamConfig,
    VerifierConfig,
    WorkspaceConfig,
)
from agentrl.core.config.base import Count, Name, Natural, NonNegative, Section
from agentrl.core.config.infrastructure import (
    EmbeddedEngineConfig,
    Engine,
    Learner,
    MetricsConfig,
    Runner,
    RunnerConfig,
    TorchLearnerConfig,
)
from agentrl.core.config.learning import (
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    MemberConfig,
    PolicyConfig,
    PromptsConfig,
    ReferenceConfig,
    Selfplay,
    SelfplayConfig,
    TeacherConfig,
    TeamConfig,
    WarmupConfig,
)
from agentrl.core.config.live import LiveConfig
from agentrl.core.config.rewards import Judge, RewardModel, RewardModelTraining
from agentrl.core.types import Sampling


class CheckpointConfig(Section, frozen=True):
    """Checkpoints during training, besides those of evaluations and of the last step."""

    # Steps between checkpoints: the most that a killed run repeats. 0: each step, or if a
    # checkpoint has more than 32 MiB, as often as takes 5 % of the time.
    every: Natural = 0


class EvalConfig(Section, frozen=True):
    """Held-out evaluations before, during and after training."""

    # Steps between evaluations; 0: only before and after training. One of 64 tasks costs as many
    # rollouts as a step of 8 groups of 8.
    every: Natural = 0
    tasks: Natural = 0  # number of tasks before and after training; 0: all held-out tasks
    curve_tasks: Natural = 64  # number of tasks during training; 0: all
    # Temperature of evaluations; other sampling parameters are those of training.
    temperature: NonNegative = 0.0
    # Rollouts per task that evaluations before and after training also sample at temperature 1;
    # more than 1 give pass@k, 0: none.
    samples: Natural = 1
    # Functions of a checkpoint's directory as "file.py:name", which return a number or a dict.
    functions: list[str] = []


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
    agent: AgentConfig = AgentConfig()
    tasks: TasksConfig = TasksConfig()
    verifier: VerifierConfig = VerifierConfig()
    audit: AuditConfig = AuditConfig()
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
    # Models that are not trained, by the name that agents may request.
    upstreams: dict[Name, UpstreamConfig] = {}
    # Who answers each role's calls, an upstream or a policy; "*": the upstream that answers all
    # others, in a run without a policy.
    roles: dict[str, str] = {}
    # [[roles.match]] in the run file: rules for the roles of calls without one. The first matching
    # rule counts; the harness's own rules come last.
    role_rules: list[RoleRule] = []
    warmup: WarmupConfig = WarmupConfig()
    # Environment, as "PLUGIN:WHAT", or your own as "file.py:Class:WHAT"; stands for agent, tasks
    # and verifier
    environment: str = ""
    # Arguments of the plug-in's constructor, and `python`: its own interpreter, by default that of
    # .venv-PLUGIN beside the run file or in the working directory, if there is one
    environment_options: dict[str, Any] = {}
    judges: dict[Name, Judge] = {}
    live: LiveConfig = LiveConfig()
    data: DataConfig = DataConfig()
    prompts: PromptsConfig = PromptsConfig()
    reward_model: RewardModelTraining = RewardModelTraining()
    reward_models: dict[Name, RewardModel] = {}
    selfplay: Selfplay = SelfplayConfig()
    sessions: SessionsConfig = SessionsConfig()
    metrics: MetricsConfig = MetricsConfig()
    workspace: WorkspaceConfig = WorkspaceConfig()

    @property
    def endpoints(self) -> set[str]:
        """The upstreams that are servers."""
        return {name for name, upstream in self.upstreams.items() if upstream.text is None}

    @property
    def teacher_server(self) -> str:
        """The upstream that is the teacher; empty: none is."""
        return self.teacher.model if self.teacher.model in self.upstreams else ""

    @property
    def plays_rollouts(self) -> bool:
        """Whether it learns from rollouts of an agent, not from a data set or a live agent."""
        return not (self.data.name or self.live.running)

    @property
    def warmup_path(self) -> Path:
        """The directory of the policy after the warm-up: a model, or an adapter."""
        return Path(self.output, "warmup")

    @property
    def initial_policy(self) -> PolicyConfig:
        """[policy] with the weights that the first step trains: those of the warm-up, once it has
        made them."""
        policy, warmed_up = self.policy, self.warmup_path
        if not (self.warmup.data and warmed_up.is_dir()):
            return policy
        if policy.lora.rank:
            return replace(policy, lora=replace(policy.lora, adapter=str(warmed_up)))
        return replace(policy, model=str(warmed_up), build="")

    def without_warmup(self) -> RunConfig:
        """The settings of a run that begins with the weights of its policy as they are."""
        return replace(self, warmup=WarmupConfig())

    def for_evaluation(self) -> RunConfig:
        """The settings with which the run is evaluated: against no opponents from a pool, and with
        the texts that a search of prompts has found."""
        prompts = self.prompts
        if prompts.components:
            directory = prompts.directory or str(Path(self.output, "prompts"))
            prompts = replace(prompts, schedule="off", directory=directory)
        return replace(self, live=LiveConfig(), prompts=prompts, selfplay=SelfplayConfig())

    def path(self, name: str) -> Path:
        """The path of a file named in the run file, relative to its folder."""
        return Path(self.root, name)

    def model_source(self, name: str) -> str:
        """The directory of a model, relative to the run file's folder, or its hub name."""
        directory = self.path(name)
        return str(directory) if directory.is_dir() else name

    def model_path(self) -> str:
        """The policy's model: a hub name or a directory, also of `policy.build` or of a warm-up."""
        name = self.initial_policy.model
        directory = self.path(name) if name else Path(self.output, "policy")
        return str(directory) if directory.is_dir() else name

    def checkpoint_path(self, name: str) -> Path:
        """The directory of a checkpoint by its name in the store, relative to `output`."""
        return Path(self.output, name)
