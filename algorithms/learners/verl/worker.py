"""One rank of the verl learner: verl's engines, built from the settings, and the methods that the
driver calls.

Runs inside a Ray actor, or in a process with torch.distributed's environment variables (`RANK`).
Imports verl, so only processes that have it import this. Invariant: the driver calls the same
method on all ranks at once, because each contains collective operations; no gradient is kept
between calls. Engines by name: the policy is "current", the critic "values", and frozen models are
"reference" and "teacher". Weights have the names that checkpoints use.

The methods of verl's `BaseEngine` are used where they suffice: passes, updates, whole weights.
FSDP2's shards are read directly for the gradient's norm before an update, optimizer state by
checkpoint name, and adapters. The optimizer of another engine is saved only by verl (`save`,
`load`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import verl.utils.model
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.utils import get_total_norm
from transformers import AutoModelForTokenClassification
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import TrainingWorker

from agentrl.algorithms.learners import memory
from agentrl.algorithms.learners.base import LossCoefficients
from agentrl.algorithms.learners.optimizer import shrink_momentum
from agentrl.algorithms.learners.torch import WeightCopy
from agentrl.algorithms.learners.verl.settings import FSDP2, MEGATRON, VerlSettings
from agentrl.algorithms.learners.verl.shards import Shard
from agentrl.algorithms.objective.values import ValueTerms, value_loss
from agentrl.core.errors import ConfigError, TrainingError, nearest

ADAPTER, WEIGHT = "base_model.model.", ".default.weight"  # around peft's names for an adapter
CONFIGS = {  # verl's classes of an engine and its optimizer
    FSDP2: (FSDPEngineConfig, FSDPOptimizerConfig),
    MEGATRON: (McoreEngineConfig, McoreOptimizerConfig),
}
LORA = ("lora_rank", "lora_alpha", "target_modules")


def policy_config(settings: VerlSettings) -> TrainingWorkerConfig:
    """Configuration of the policy's engine, which verl's worker builds itself."""
    engine, optimizer = CONFIGS[settings["engine"]["strategy"]]
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=_verl_config(HFModelConfig, settings["model"]),
        engine_config=_verl_config(engine, settings["engine"]),
        optimizer_config=_verl_config(optimizer, settings["optimizer"]),
        checkpoint_config=CheckpointConfig(),
    )


def check_options(settings: VerlSettings) -> None:
    """Raise ConfigError for options that verl's configuration classes reject, and for an engine
    that is not installed."""
    strategy = settings["engine"]["strategy"]
    parts = dict(zip(("engine", "optimizer"), CONFIGS[strategy], strict=True))
    # Building the config would load the model's files.
    _check_keys(HFModelConfig, settings["model"])
    for part, kind in parts.items():
        try:
            _verl_config(kind, settings[part])
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"learner.verl.options.{part}: verl refuses it: {error}") from None
    try:
        EngineRegistry.get_engine_cls("language_model", strategy)
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"learner.verl.options.engine.strategy = {strategy!r}: verl cannot load it here "
            f"({error}); install its requirements (see verl's documentation) on every node"
        ) from None


def scoring_engine(settings: VerlSettings, path: str) -> Any:
    """The forward-only engine of a frozen model. path: directory or hub name."""
    model = {key: value for key, value in settings["model"].items() if key not in LORA}
    engine = settings["engine"] | {"forward_only": True}
    # Megatron's engine reads the optimizer's settings even without an optimizer.
    return _open_engine("language_model", model | {"path": path}, engine, settings["optimizer"])


def value_engine(settings: VerlSettings) -> Any:
    """The engine of the critic: a decoder with a new head, one number initialised to 0."""
    settings_of_critic = settings["critic"]
    with _value_models():
        return _open_engine(
            "value_model",
            settings_of_critic["model"],
            settings["engine"],
            settings_of_critic["optimizer"],
        )


def checkpoint_names(module: Module, of: str) -> dict[str, str]:
    """Checkpoint name -> verl's name of every weight and buffer. In checkpoints a critic has the
    names "decoder.*" and "head.*", an adapter peft's names without ADAPTER and WEIGHT, other models
    their own names."""
    if of == "values":
        decoder = f"{module.base_model_prefix}."
        return {_of_critic(key, decoder): key for key in module.state_dict()}
    return {key.removeprefix(ADAPTER).removesuffix(WEIGHT): key for key in module.state_dict()}


def _of_critic(key: str, decoder: str) -> str:
    if key.startswith(decoder):
        return "decoder." + key.removeprefix(decoder)
    return "head." + key.rpartition(".")[2]


def _open_engine(
    kind: str, model: Mapping[str, Any], engine: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> Any:
    engine_kind, optimizer_kind = CONFIGS[engine["strategy"]]
    config, engine_config = _verl_config(HFModelConfig, model), _verl_config(engine_kind, engine)
    config.model_type, engine_config.use_remove_padding = kind, config.use_remove_padding
    built = EngineRegistry.new(
        model_type=kind,
        backend=engine["strategy"],
        model_config=config,
        engine_config=engine_config,
        optimizer_config=_verl_config(optimizer_kind, optimizer),
        checkpoint_config=CheckpointConfig(),
    )
    built.initialize()
    return built


def _verl_config(kind: type, options: Mapping[str, Any]) -> Any:
    """A configuration object of verl. Raises ConfigError for a setting this release lacks."""
    _check_keys(kind, options)
    return kind(**options)


def _check_keys(kind: type, options: Mapping[str, Any]) -> None:
    names = {field.name for field in fields(kind)}
    for key in options:
        if key not in names:
            raise ConfigError(
                f"learner.kind = 'verl': {kind.__name__} of the verl that is installed has no "
                f"{key!r}; {nearest(key, names)} in learner.verl.options"
            )


@contextmanager
def _value_models() -> Iterator[None]:
    """Context in which verl's engine loads value models by `_value_model`: verl 0.9's loader needs
    flash attention regardless of the settings, or else trl."""
    before = verl.utils.model.load_valuehead_model
    verl.utils.model.load_valuehead_model = _value_model
    try:
        yield
    finally:
        verl.utils.model.load_valuehead_model = before


def _value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> Module:
    """A decoder with a new head of zeros; has the signature of verl's loader."""
    model: Module = AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
    decoder = model.get_submodule(str(model.base_model_prefix))
    inside = {id(parameter) for parameter in decoder.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            torch.nn.init.zeros_(parameter)
    return model


FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINED_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
BROADCAST_PART = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


@dataclass(slots=True)
class BackwardResult:
    """The result of one backward pass of an engine."""

    loss: float  # this rank's part of the sum, without the critic's coefficient
    grad_norm: float  # over all ranks
    clipped: int = 0  # number of clipped values on this rank
    columns: dict[str, Tensor] = field(default_factory=dict)  # float32, one number per action


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The result of one step on one rank."""

    policy: BackwardResult
    critic: BackwardResult | None
    applied: bool
    metrics: dict[str, float]


class PolicyWorker(TrainingWorker):  # type: ignore[misc]  # verl has no types
    """The shards of policy, critic, their optimizers and the frozen models on one rank."""

    def __init__(self, settings: VerlSettings, frozen: dict[str, str]) -> None:
        super().__init__(policy_config(settings))
        self.settings = settings
        self.paths = frozen
        self.sharded = settings["engine"]["strategy"] == FSDP2
        self.engines: dict[str, Any] = {"current": self.engine}
        self.marked = WeightCopy()

    def open(self) -> None:
        """Load the models."""
        self.reset()
        if self.settings["critic"]:
            self.engines["values"] = value_engine(self.settings)
        for name, path in self.paths.items():
            self.engines[name] = scoring_engine(self.settings, path)
        for engine in self.engines.values():
            _without_dropout(engine.module)
            for group in engine.optimizer.param_groups if self.sharded and engine.optimizer else []:
                # An adapter's base weights are frozen and have no moments.
                group["params"] = [
                    parameter for parameter in group["params"] if parameter.requires_grad
                ]

    def layout(self) -> tuple[int, bool]:
        """(index of the shard of rows that this rank computes, whether this rank returns the
        shard's result). Other ranks of the same shard hold other parts of the model or rows."""
        return self.engine.get_data_parallel_rank(), self.engine.is_mp_src_rank_with_outputs()

    def logprobs(self, shard: Shard, of: str) -> Tensor:
        """Log-probs of the shard's actions in order, float32. If the reference has no engine, it is
        the policy without its adapter."""
        engine: Any = self.engines.get(of, self.engine)
        alone = engine.disable_adapter() if of not in self.engines else nullcontext()
        with engine.eval_mode(), alone:
            output = engine.infer_batch(self._data(shard), loss_function=None)
        return _of_actions(output, shard, "log_probs") if self.layout()[1] else torch.empty(0)

    def values(self, shard: Shard) -> Tensor:
        """The critic's values of the states before the shard's actions in order, float32."""
        engine = self.engines["values"]
        with engine.eval_mode():
            output = engine.infer_batch(self._data(shard), loss_function=None)
        return _of_actions(output, shard, "values")

    def step(
        self, shard: Shard, coefficients: LossCoefficients, lr: float, terms: ValueTerms | None
    ) -> ShardReport:
        """Forward, backward and, if everything is finite, update."""
        started, device = time.monotonic(), torch.device(get_device_name())
        memory.start_measuring(device)
        critic = None if terms is None else self.engines["values"]
        with ExitStack() as stack:
            for engine in filter(None, (self.engine, critic)):
                # The end of this context frees the gradients.
                stack.enter_context(engine.train_mode())
            policy = self._backward(
                self.engine, shard, partial(policy_loss, coefficients=coefficients)
            )
            value = None
            if terms is not None:
                value = self._backward(critic, shard, partial(critic_loss, terms=terms))
            applied = math.isfinite(policy.grad_norm + (value.grad_norm if value else 0.0))
            if applied:
                # If psi is 0 and only the critic learns, momentum would still move the policy.
                if policy.grad_norm > 0 or critic is None:
                    policy = self._updated(policy, lr)
                if critic is not None:
                    _update(critic, self.settings["critic"]["optimizer"]["lr"])
        metrics = self._speed(shard, time.monotonic() - started) | memory.peak(device)
        return ShardReport(policy, value, applied, metrics)

    def mark(self) -> None:
        """See `Learner.mark`, for this rank's shards."""
        self.marked.take(self._trained())

    def shrink(self, share: float) -> None:
        """See `Learner.shrink`."""
        self.marked.shrink(self._trained(), share)
        shrink_momentum(self.engine.optimizer, share)

    def _trained(self) -> list[Tensor]:
        trained = [p.detach() for p in self.engine.module.parameters() if p.requires_grad]
        return [p.to_local() if isinstance(p, DTensor) else p for p in trained]

    def weights(self, of: str) -> dict[str, Tensor]:
        """The weights of an engine, or of its adapter, float32, by checkpoint name; empty on ranks
        other than 0."""
        module = self.engines[of].module
        if of != "values" and not self._adapted(of):
            return self._whole(of)
        options = TRAINED_STATE if self._adapted(of) else FULL_STATE
        state: dict[str, Any] = get_model_state_dict(module, options=options)
        return {
            ours: state[key] for ours, key in checkpoint_names(module, of).items() if key in state
        }

    def _whole(self, of: str) -> dict[str, Tensor]:
        """All weights of an engine by verl's export, one at a time on the device."""
        on_cpu, (exported, _) = {}, self.engines[of].get_per_tensor_param()
        for name, weight in exported:  # collective: every rank takes part
            if self.rank == 0:
                on_cpu[name] = weight.detach().to("cpu", torch.float32, copy=True)
        return on_cpu

    def save(self, folder: str) -> None:
        """Write verl's checkpoint of the policy and its optimizer; all nodes must share the
        folder."""
        self.engine.save_checkpoint(folder)

    def load(self, folder: str) -> None:
        """Load what `save` wrote."""
        self.engine.load_checkpoint(folder, del_local_after_load=False)

    def moments(self, of: str) -> dict[str, Tensor]:
        """The optimizer's state as "<parameter>/<moment>"; rank 0 only, empty before a step."""
        engine = self.engines[of]
        if not engine.optimizer.state:
            return {}
        state: Any = get_optimizer_state_dict(engine.module, engine.optimizer, options=FULL_STATE)
        by_parameter = state.get("state", {})
        return {
            f"{ours}/{moment}": torch.as_tensor(value)
            for ours, key in checkpoint_names(engine.module, of).items()
            for moment, value in by_parameter.get(key, {}).items()
        }

    def restore(
        self, of: str, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], begun: bool
    ) -> None:
        """Load weights and moments, as `weights` and `moments` return them; rank 0 gets the values,
        others empty mappings. begun: whether there are moments."""
        module, optimizer = self.engines[of].module, self.engines[of].optimizer
        keys = checkpoint_names(module, of)
        renamed: dict[str, Any] = {keys[name]: weight for name, weight in weights.items()}
        options = BROADCAST_PART if self._adapted(of) else BROADCAST
        set_model_state_dict(module, renamed, options=options)
        if optimizer is None:
            return
        if not begun:
            optimizer.state.clear()
            return
        state: dict[str, dict[str, Tensor]] = {}
        for key, tensor in moments.items():
            name, _, moment = key.rpartition("/")
            state.setdefault(keys[name], {})[moment] = tensor
        groups = get_optimizer_state_dict(module, optimizer, options=FULL_STATE).get(
            "param_groups", []
        )
        saved: dict[str, Any] = {"state": state, "param_groups": groups} if state else {}
        set_optimizer_state_dict(module, optimizer, saved, options=BROADCAST)

    def follow(self, of: str) -> None:
        """Copy the current policy into a frozen model."""
        pairs = zip(
            self.engines[of].module.named_parameters(),
            self.engine.module.named_parameters(),
            strict=True,
        )
        with torch.no_grad():
            for (name, frozen_weight), (policy_name, weight) in pairs:
                assert name == policy_name, f"{name} is not {policy_name}"
                frozen_weight.to_local().copy_(
                    weight.to_local()
                )  # both are sharded in the same way

    def _backward(self, engine: Any, shard: Shard, loss: Any) -> BackwardResult:
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(self._data(shard, entropy=True), loss)
        metrics = output.get("metrics", {})  # empty except on the last pipeline stage
        names = output["model_output"].keys() if self.layout()[1] else ()
        loss = sum(metrics.get("loss", []))
        return BackwardResult(
            loss=loss,
            grad_norm=_grad_norm(engine.module) if self.sharded else _finite_everywhere(loss),
            clipped=sum(metrics.get("clipped", [])),
            columns={name: _of_actions(output, shard, name) for name in names},
        )

    def _updated(self, policy: BackwardResult, lr: float) -> BackwardResult:
        """Update the policy. For engines other than FSDP2 the gradient's norm is known only
        here."""
        norm = _update(self.engine, lr)
        if self.sharded:
            return policy
        if not math.isfinite(norm):
            raise TrainingError(
                "verl's engine has applied a gradient that is not finite; the same command goes on "
                "after the last checkpoint"
            )
        return replace(policy, grad_norm=norm)

    def _adapted(self, of: str) -> bool:
        return of == "current" and bool(self.settings["model"].get("lora_rank"))

    def _speed(self, shard: Shard, seconds: float) -> dict[str, float]:
        """throughput/tflops of the policy's update on this GPU, and throughput/mfu, the fraction of
        the GPU's peak; each only if verl knows it for this model and GPU."""
        achieved, possible = self.flops_counter.estimate_flops(shard.lengths, seconds)
        metrics = {"throughput/tflops": float(achieved)} if achieved else {}
        if achieved and math.isfinite(possible):
            metrics["throughput/mfu"] = float(achieved / possible)
        return metrics

    def _data(self, shard: Shard, *, entropy: bool = False) -> TensorDict:
        masks, places = [], []
        for tokens, states, index in zip(shard.tokens, shard.states, shard.index, strict=True):
            mask, place = torch.zeros_like(tokens), torch.zeros_like(tokens)
            mask[states] = 1
            place[states] = index
            masks.append(mask)
            places.append(place)
        return tensordict_utils.get_tensordict(
            {
                "input_ids": _jagged(shard.tokens),
                "position_ids": _jagged([torch.arange(len(row)) for row in shard.tokens]),
                "loss_mask": _jagged(masks),  # at the position before each action
                "place": _jagged(places),
                "temperature": shard.temperature,
            },
            non_tensor_dict={
                "pad_token_id": 0,
                "use_remove_padding": self.settings["model"]["use_remove_padding"],
                "use_dynamic_bsz": True,
                "use_fused_kernels": False,
                "calculate_entropy": entropy,
                "max_token_len_per_gpu": shard.token_budget,
                "return_model_output": True,
            },
        )


def policy_loss(
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: Any = None,
    *,
    coefficients: LossCoefficients,
) -> tuple[Tensor, dict[str, float]]:
    """- sum_t sg[psi_t] * log pi_t, times the number of ranks that FSDP averages over. NaN if a
    log-prob is not finite, which makes every rank's gradient NaN."""
    logprobs = model_output["log_probs"].values()  # at each position, of the next token
    chosen = data["loss_mask"].values().bool()
    if not chosen.any():
        return (logprobs * 0.0).sum(), {"loss": 0.0}
    p = logprobs[chosen].float()
    current = p.detach().cpu()
    if not current.isfinite().all():
        return p.sum() * math.nan, {"loss": math.nan}
    coefficients_n = coefficients(current, data["place"].values()[chosen].cpu())
    ranks = torch.distributed.get_world_size(dp_group)
    loss = -float(coefficients_n.double() @ current.double())
    return -(coefficients_n.to(p) * p).sum() * ranks, {"loss": loss}


def critic_loss(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None, *, terms: ValueTerms
) -> tuple[Tensor, dict[str, float]]:
    """A loss with the gradient of `values.value_loss` times the ranks; metrics: that loss."""
    values = model_output["values"].values()  # at each position, of the state after it
    chosen = data["loss_mask"].values().bool()
    if not chosen.any():
        return (values * 0.0).sum(), {"loss": 0.0, "clipped": 0}
    v = values[chosen].float()
    loss, gradient, clipped = value_loss(terms, v, data["place"].values()[chosen].cpu())
    ranks = torch.distributed.get_world_size(dp_group)
    metrics = {"loss": float(loss), "clipped": int(clipped.sum())}
    return (gradient.to(v) * v).sum() * ranks, metrics


def _grad_norm(module: torch.nn.Module) -> float:
    norm = get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _finite_everywhere(loss: float) -> float:
    """0, or NaN where the loss of any rank is not finite."""
    total = torch.tensor(loss, device=get_device_name())
    torch.distributed.all_reduce(total)
    return 0.0 if total.isfinite() else math.nan


def _update(engine: Any, lr: float) -> float:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    return float(engine.optimizer_step())


def _of_actions(output: dict[str, Any], shard: Shard, name: str) -> Tensor:
    rows = output["model_output"][name].unbind()
    per_row = [row[at.to(row.device)] for row, at in zip(rows, shard.states, strict=True)]
    return torch.cat(per_row).float().cpu()


def _jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _without_dropout(module: Any) -> None:
    """Set dropout to 0: verl trains in training mode, where sampler and learner would disagree."""
    parts = module if isinstance(module, list) else [module]  # Megatron has stages
    for submodule in chain.from_iterable(part.modules() for part in parts):
        if isinstance(submodule, torch.nn.Dropout):
            submodule.p = 0.0
        # Attention layers of transformers have such a module.
        for name, value in list(vars(submodule).items()):
            if name.endswith("dropout") and isinstance(value, float):
                setattr(submodule, name, 0.0)
