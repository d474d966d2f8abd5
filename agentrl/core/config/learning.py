"""Tables of learning: the policies, how they learn from a batch, and what else they learn from:
opponents and replays, a data set, demonstrations, prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from agentrl.core.config.base import (
    Count,
    Name,
    Natural,
    NonNegative,
    Positive,
    Section,
    kind_of,
)
from agentrl.core.errors import install_command
from agentrl.core.loading import is_installed

if TYPE_CHECKING:
    from agentrl.core.config.schema import RunConfig


MODEL_LR = 1e-5  # default learning rate of a critic that is a separate model
MINIBATCH = 3  # tasks whose traces the reflector of prompts reads for a proposal, as in GEPA
INITIAL = "first"  # in `substitutes`: the role's own policy before training
Template = Annotated[
    str,
    msgspec.Meta(
        description="a file with a Jinja template in place of the model's, or the name of one with"
        " tools: chatml, qwen, smollm, qwen3_coder, llama3, mistral, mistral_v3,"
        " gemma, phi, deepseek"
    ),
]
ToolFormat = Annotated[
    str,
    msgspec.Meta(
        description="the format in which the model writes calls, by vLLM's names: hermes,"
        " llama3_json, mistral, pythonic, qwen3_coder, deepseek_v3, deepseek_v31, phi4_mini_json,"
        " or a parser of your own as package.module:name; default: that of the named template"
        " or of the file, else hermes"
    ),
]
Vision = Annotated[
    Literal["", "frozen", "trained"],
    msgspec.Meta(
        description="whether the policy sees images in messages, and whether its vision tower is"
        " trained; default: a call with an image is refused"
    ),
]


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
    chat_template: Template = ""
    tool_format: ToolFormat = ""
    vision: Vision = ""


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
    chat_template: Template = ""
    tool_format: ToolFormat = ""
    vision: Vision = ""


class TeamConfig(Section, frozen=True):
    """Which of several policies learn in a step.

    together: all of them. alternating: in turn, in the order of the run file. sequence: the same,
    but each policy has only one turn, and the last policy's turn lasts to the end."""

    # the policies that learn in a step: all, or one after the other
    schedule: Literal["together", "alternating", "sequence"] = "together"
    every: Count = 1  # steps of each turn


class BranchingConfig(Section, frozen=True):
    """Additional rollouts of a group, queued when the group's own have ended. Each replays the
    first calls of an earlier rollout and samples the rest.

    mc: branch before each call of every rollout. tree: branch before the calls of the group in
    which the policy is least certain."""

    kind: Literal["none", "mc", "tree"] = "none"  # the calls that are sampled again
    width: Count = 1  # branches per call
    # Number of calls, least certain first, per rollout (mc; 0: all) or group (tree).
    calls: Natural = 0

    def __post_init__(self) -> None:
        if self.kind == "none" and (self.width, self.calls) != (1, 0):
            raise ValueError("width and calls have no effect without kind = 'mc' or 'tree'")
        if self.kind == "tree" and not self.calls:
            raise ValueError("kind = 'tree' needs `calls`, the number of calls per group")

    @property
    def joins(self) -> bool:
        return self.kind != "none"


class CounterfactualConfig(Section, frozen=True):
    """Replays of rollouts with other policies in some roles, queued when the rollouts have ended.
    They measure the contribution of a role."""

    # Replacement of each role: a policy, an upstream, or "first", the role's own policy before
    # training. The contributions of these roles are measured.
    substitutes: dict[str, str] = {}
    # Reward of a role: the value of the team minus that of the team without the role, or the role's
    # mean marginal contribution to coalitions of the others.
    value: Literal["difference", "shapley"] = "difference"

    def __post_init__(self) -> None:
        if not self.substitutes and self.value != "difference":
            raise ValueError("value has no effect without substitutes")

    @property
    def joins(self) -> bool:
        return bool(self.substitutes)


class AlgorithmConfig(Section, frozen=True):
    """How a policy learns from a batch. `options` are arguments of the preset."""

    # Name from `agentrl algorithms`, with modifiers as in "grpo+tis", or your own "file.py:name".
    preset: str = "auto"
    # arguments of the preset: `agentrl algorithms NAME` lists them
    options: dict[str, Any] = {}
    groups: Count = 8  # Groups of rollouts per step, one for each task.
    group_size: Count = 8  # rollouts per task, which are compared with each other
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
    group_order: Literal["requested", "completed"] = "requested"
    # Whether groups of equal reward are replaced; none: preset's default (only dapo does). That
    # keeps steps equally large, for as many rollouts per group that has a gradient.
    dynamic_sampling: bool | None = None
    minibatches: Count = 1  # optimizer steps per pass over a batch
    epochs: Count = 1  # passes over a batch
    lr: Positive = 1e-6  # peak learning rate; for an adapter 5e-4 (135 M) to 1e-4 (8 B)
    warmup: Natural = 0  # steps of linear learning-rate warm-up
    # Learning rate after the warm-up.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: NonNegative = 0.0  # Learning rate at the end of a linear or cosine schedule.
    # Largest KL of an update, in nats per token: a larger update is undone, and repeated with half
    # the learning rate until it is within. Default, if the learner can undo updates: 0.05 for each
    # optimizer step. While recent updates exceed a tenth of the limit, the learning rate is
    # lowered. 0: neither.
    max_kl: NonNegative | None = None
    weight_decay: NonNegative = 0.0  # decay of AdamW, per step and unit of lr, also for a critic
    max_grad_norm: Positive = 1.0  # Norm to which gradients are clipped.
    branching: BranchingConfig = BranchingConfig()
    counterfactual: CounterfactualConfig = CounterfactualConfig()

    @property
    def min_group(self) -> int:
        """Valid rollouts below which a group is dropped: a single one cannot be compared."""
        return min(2, self.group_size)

    @property
    def samples_during_update(self) -> bool:
        """Whether the sampler has its own copy of the weights and continues during updates."""
        return self.async_sampling in ("in_flight", "one_step_off")

    @property
    def joins(self) -> bool:
        """Whether more rollouts join a group when its own have ended."""
        return self.branching.joins or self.counterfactual.joins

    def problems(self, config: RunConfig) -> Iterator[str]:
        if self.joins and self.group_order != "requested":
            yield (
                "algorithm.group_order: with algorithm.branching or counterfactual, rollouts join "
                "a group when its own have ended; remove one of them"
            )


class CriticConfig(Section, frozen=True):
    """The value model of presets such as ppo."""

    # Value model. "shared": a head on the policy's hidden states; "copy": a separate model that
    # starts as the policy; or a checkpoint directory or hub name of a model with its vocabulary.
    # Empty: none.
    model: str = ""
    # Constant learning rate of the model, or of a shared critic's head, which starts at 0. None:
    # 0.05 / hidden size for a head (so values move equally fast in any model), 1e-5 for a model.
    lr: Positive | None = None
    clip: Positive = 0.2  # value clipping: largest change of a value in one step; inf: off


class ReferenceConfig(Section, frozen=True):
    """The reference policy of KL penalties."""

    # A checkpoint directory or hub name; empty: the initial policy or, for an adapter, its base.
    model: str = ""
    every: Natural = 0  # steps between resets of the reference to the current policy; 0: never
    # KL in nats per token to which the penalty's coefficient adapts; 0: fixed coefficient.
    target_kl: NonNegative = 0.0
    kl_horizon: Count = 10_000  # rollouts over which the penalty adapts


class TeacherConfig(Section, frozen=True):
    """The model that `distill` and `+distill` imitate: in memory or served by vLLM."""

    # A checkpoint directory or hub name with the policy's vocabulary; or the name of one of
    # [upstreams]: vLLM or another server with `prompt_logprobs` and the policy's vocabulary, whose
    # log-probs are at temperature 1.
    model: str = ""

    def problems(self, config: RunConfig) -> Iterator[str]:
        if self.model not in config.upstreams:
            return
        if self.model not in config.endpoints:
            yield (
                f"teacher.model = {self.model!r}: this upstream answers with a fixed text; name "
                "one that is a server, or a model"
            )
        if config.sampling.temperature not in (0, 1):
            yield "sampling.temperature: a teacher's server returns log-probs at 1; set it to 1"


class SelfplayConfig(Section, frozen=True, tag_field="opponents", tag="self"):
    """Games with several seats; the trained policy plays all of them."""

    # Roles of the game; none: no self-play. Of several policies, that with one of these plays all.
    seats: list[str] = []

    @property
    def opponents(self) -> str:
        return kind_of(self)

    def __post_init__(self) -> None:
        if len(set(self.seats)) != len(self.seats) or len(self.seats) == 1:
            raise ValueError("seats must be two or more roles, each named once")


class SnapshotOpponents(SelfplayConfig, frozen=True, kw_only=True):
    """The trained policy plays one seat, and its snapshots play the others."""

    seats: Annotated[list[str], msgspec.Meta(min_length=2)]  # roles; the policy alternates evenly
    # Fraction of groups in which the policy plays itself.
    self_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5
    every: Count = 10  # steps between snapshots
    pool: Count = 8  # snapshots to keep


class LatestOpponents(SnapshotOpponents, frozen=True, tag="latest"):
    """The newest snapshot plays."""


class UniformOpponents(SnapshotOpponents, frozen=True, tag="uniform"):
    """Every snapshot plays equally often."""


class PfspOpponents(SnapshotOpponents, frozen=True, tag="pfsp"):
    """Hard snapshots are drawn most often (prioritised fictitious self-play)."""


Selfplay = SelfplayConfig | LatestOpponents | UniformOpponents | PfspOpponents


PLAYING = (
    "agent", "workspace", "tasks", "verifier", "policies", "team", "sampling", "runner",
    "upstreams", "roles", "role_rules", "judges", "prompts", "reward_models", "selfplay",
)  # fmt: skip
SAMPLING = (
    "group_size", "max_staleness", "dynamic_sampling",
    "max_kl", "branching", "counterfactual",
)  # fmt: skip
"""The tables, and the settings of [algorithm], that are about rollouts."""


class DataConfig(Section, frozen=True):
    """Train on a data set of the store (see `agentrl data`) instead of agent, tasks and verifier. A
    step trains on `algorithm.groups` items of the split "train", and [eval] measures the loss on
    the split "test"."""

    # Data set, as "NAME" or "NAME@VERSION"; default of the version: the newest at the start of the
    # run. Empty: train on rollouts.
    name: str = ""

    @property
    def set_name(self) -> str:
        """The name without a version."""
        return self.name.rpartition("@")[0] if self.version else self.name

    @property
    def version(self) -> int:
        """0: none is named."""
        digits = self.name.rpartition("@")[2] if "@" in self.name else ""
        return int(digits) if digits.isascii() and digits.isdigit() else 0

    def problems(self, config: RunConfig) -> Iterator[str]:
        """A run on a data set runs no agent and serves no policy."""
        if not self.name:
            return
        problem = "has no effect in a run on [data], which plays no rollouts"
        for table in _changed(config, PLAYING):
            yield f"[{table}] {problem}; remove one"
        for key in _changed(config.algorithm, SAMPLING):
            yield f"algorithm.{key} {problem}"


def _changed(section: Section, names: tuple[str, ...]) -> Iterator[str]:
    """Those of the named settings that do not have their defaults."""
    defaults = type(section)()
    return (name for name in names if getattr(section, name) != getattr(defaults, name))


class WarmupConfig(Section, frozen=True):
    """Supervised fine-tuning of the policy before the run's first step."""

    # Conversations, as "file.jsonl" or "file.py:name" of {"messages": [...], "tools": [...]};
    # empty: no fine-tuning
    data: str = ""
    steps: Count = 100  # Optimizer steps, at most; it ends once held-out conversations are learned.
    batch: Count = 16  # conversations per optimizer step, drawn at random
    # Peak learning rate: linear warm-up over 10 % of the steps, then linear decay to 0.
    lr: Positive = 1e-5

    def problems(self, config: RunConfig) -> Iterator[str]:
        if not self.data:
            if self != WarmupConfig():
                yield "[warmup] has no effect without `data`, the conversations to imitate"
            return
        if config.policies and not config.policy.lora.rank:
            yield (
                "[warmup] of several policies trains adapters; set policy.lora.rank, or do it in"
                " runs of one policy and use their <output>/warmup as models"
            )
        elif config.policy.lora.rank and config.learner.kind != "torch":
            yield (
                "[warmup] trains an adapter only with learner.kind = 'torch'; do it in another run"
                " and use its <output>/warmup as policy.lora.adapter"
            )


class PromptComponent(Section, frozen=True):
    """A text of the agent in the system or developer message of a role's calls, or in the
    description of one of their tools."""

    file: str  # file with the text as the agent sends it
    role: str = ""  # Role whose calls have the text; default: the component's name.
    tool: str = ""  # the tool whose description the text is; default: a message
    # Whether to add the text as a system message, which the agent does not have.
    insert: bool = False


class PromptsConfig(Section, frozen=True):
    """A search for better texts with rollouts on `tasks.train`: `agentrl prompts`."""

    # Texts by name, each as a file or a table; none: no search.
    components: dict[Name, str | PromptComponent] = {}
    # Method of the search: GEPA (arXiv 2507.19457) or APO (arXiv 2305.03495).
    algorithm: Literal["gepa", "apo"] = "gepa"
    reflector: str = ""  # the upstream or policy that proposes texts
    budget: Count = 400  # rollouts of a search, without held-out evaluations
    validation: Count = 12  # tasks (the last of tasks.train) on which candidates are compared
    directory: str = ""  # folder of the texts to use; default: the result of the search
    perfect_score: float = 1.0  # mean score at which the search ends
    # Order of search and training, for `agentrl train`. off: train with the texts that `agentrl
    # prompts` found. before: search, then train. A number: search again after every that
    # many steps, with the current policy.
    schedule: Literal["off", "before"] | Count = "off"

    def problems(self, config: RunConfig) -> Iterator[str]:
        if not self.components:
            if self != PromptsConfig():
                yield "[prompts] has no effect without prompts.components, the texts to rewrite"
            return
        models = {*config.upstreams, *(config.policies or {"policy"})}
        if self.reflector not in models:
            yield (
                f"prompts.reflector = {self.reflector!r}; name the model that proposes texts: "
                f"{', '.join(sorted(models))}"
            )
        if isinstance(self.schedule, int) and config.algorithm.max_staleness:
            yield (
                f"prompts.schedule = {self.schedule} with algorithm.max_staleness: rollouts "
                "requested ahead would use the previous texts; remove one of them"
            )
        min_budget = self.validation + 3 * (MINIBATCH + self.validation)
        if self.budget < min_budget:
            yield (
                f"prompts.budget = {self.budget} rollouts are too few to evaluate; set at least "
                f"{min_budget}, validation + 3 x ({MINIBATCH} + validation)"
            )
        if self.algorithm == "gepa" and not is_installed("gepa"):
            yield f"prompts.algorithm: 'gepa' is not installed: {install_command('prompts')}"
