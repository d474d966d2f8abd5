"""The run file: TOML into typed settings. An unknown or inapplicable key is an error with its path."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentrl.errors import ConfigError
from agentrl.types import Sampling


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all tables of the run file."""


class AgentConfig(Section):
    """The unmodified agent and how it is run."""

    path: str = ""  # "file.py:name" or "package.module:name"
    timeout: float = 60.0  # seconds for one attempt
    max_attempts: int = 3  # tries at one rollout when the infrastructure fails
    error_reward: float | None = None  # outcome when the agent itself raises; none: missing


class TasksConfig(Section):
    """Each a "file.jsonl" or a "file.py:name" that is an iterable of tasks or returns one."""

    train: str = ""
    heldout: str = ""


class VerifierConfig(Section):
    path: str = ""  # "file.py:name"


class PolicyConfig(Section):
    """A Hugging Face checkpoint directory or hub name."""

    model: str = ""
    build: str = ""  # "file.py:name": function (directory, seed) that makes `model` if it is absent
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"


class AlgorithmConfig(Section):
    """What is learned from a batch. `options` are the preset's own arguments."""

    preset: str = "grpo"
    options: dict[str, Any] = {}
    groups: int = 8  # per step
    group_size: int = 8
    min_group: int = 2  # valid rollouts below which a group is dropped
    max_staleness: int = 0  # steps that may be asked for ahead of the update
    minibatches: int = 1
    epochs: int = 1
    lr: float = 1e-6
    warmup: int = 0  # steps of linear learning-rate warm-up
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class LearnerConfig(Section):
    token_budget: int = 4096  # tokens forwarded at once
    threads: int = 0  # 0: all cores


class EngineConfig(Section):
    """The embedded policy server."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    max_batch: int = 64  # calls decoded together
    max_context: int = 2048  # tokens of prompt and completion
    threads: int = 1


class RunnerConfig(Section):
    processes: int = 1
    concurrency: int = 64  # rollouts at a time in one process
    lease: float = 15.0  # seconds without a heartbeat until a rollout is given to another runner
    port: int = 0  # of the gateway; 0: any free one


class EvalConfig(Section):
    every: int = 0  # steps; 0: only before and after
    tasks: int = 0  # held-out tasks per evaluation; 0: all
    sampled: bool = True  # also score before and after at temperature 1
    sampling: Sampling = Sampling(temperature=0.0)


class RunConfig(Section):
    """One training job. Paths are relative to the run file's folder (`root`)."""

    name: str = "run"
    root: str = "."
    output: str = ""  # folder of store, checkpoints and figures; default: runs/<name>
    store: str = ""  # store URL; default: sqlite in the output folder
    seed: int = 0
    steps: int = 100
    keep_checkpoints: int = 2
    agent: AgentConfig = AgentConfig()
    tasks: TasksConfig = TasksConfig()
    verifier: VerifierConfig = VerifierConfig()
    policy: PolicyConfig = PolicyConfig()
    sampling: Sampling = Sampling()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    engine: EngineConfig = EngineConfig()
    runner: RunnerConfig = RunnerConfig()
    eval: EvalConfig = EvalConfig()
