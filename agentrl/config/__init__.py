"""Settings: the run file as typed, checked values.

`schema` and `infrastructure` hold the tables, `validate` checks them together, `load` reads the
file; other packages import from here.
"""

from agentrl.config.base import Count, Natural, Positive, Section
from agentrl.config.infrastructure import (
    ContainerConfig,
    EngineConfig,
    KubernetesConfig,
    LearnerConfig,
    PoolConfig,
    RunnerConfig,
    VerlConfig,
    VllmConfig,
)
from agentrl.config.load import differences, load, resolve, to_toml
from agentrl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    BranchingConfig,
    CounterfactualConfig,
    CriticConfig,
    EvalConfig,
    LoraConfig,
    MemberConfig,
    MetricsConfig,
    PolicyConfig,
    ReferenceConfig,
    RetriesConfig,
    RewardModelConfig,
    RunConfig,
    SelfplayConfig,
    TasksConfig,
    TeacherConfig,
    TeamConfig,
    UpstreamConfig,
    VerifierConfig,
)

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "BranchingConfig",
    "ContainerConfig",
    "Count",
    "CounterfactualConfig",
    "CriticConfig",
    "EngineConfig",
    "EvalConfig",
    "KubernetesConfig",
    "LearnerConfig",
    "LoraConfig",
    "MemberConfig",
    "MetricsConfig",
    "Natural",
    "PolicyConfig",
    "PoolConfig",
    "Positive",
    "ReferenceConfig",
    "RetriesConfig",
    "RewardModelConfig",
    "RunConfig",
    "RunnerConfig",
    "Section",
    "SelfplayConfig",
    "TasksConfig",
    "TeacherConfig",
    "TeamConfig",
    "UpstreamConfig",
    "VerifierConfig",
    "VerlConfig",
    "VllmConfig",
    "differences",
    "load",
    "resolve",
    "to_toml",
]
