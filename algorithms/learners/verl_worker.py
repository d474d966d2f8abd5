"""One rank of the verl learner: verl's FSDP engine, and the few verbs that the driver calls.

Runs inside a Ray actor, or alone in a process with `RANK` and the like in its environment. Imports
verl, so only who has it may import this. Always true: every rank is called with the same verb at
the same time, because each contains collective operations; and between calls no gradient is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import TrainingWorker

from agentrl.algorithms.learners.base import Psi
from agentrl.algorithms.learners.verl_settings import Settings
from agentrl.errors import ConfigError

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one rank. Every rank has as many; one without actions only fills up."""

    tokens: list[Tensor]  # int64 [L] each
    states: list[Tensor]  # int64 [A] each, the positions before the actions
    index: list[Tensor]  # int64 [A] each, place in the batch's token level
    temperature: Tensor  # float32 [rows]
    token_budget: int  # of one micro-batch, at least the longest row of any rank


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a rank knows of one step."""

    loss: float  # this rank's share of the sum, times the number of ranks
    grad_norm: float  # of all ranks
    logprobs: Tensor  # float32, of the shard's actions in order


class PolicyWorker(TrainingWorker):  # type: ignore[misc]  # verl has no types
    """A shard of the policy and of its optimizer, and of the frozen models that only score."""

    def __init__(self, settings: Settings, frozen: dict[str, str]) -> None:
        super().__init__(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=_made(HFModelConfig, settings, "model"),
                engine_config=_made(FSDPEngineConfig, settings, "engine"),
                optimizer_config=_made(FSDPOptimizerConfig, settings, "optimizer"),
                checkpoint_config=CheckpointConfig(),
            )
        )
        self.settings = settings
        self.paths = frozen
        self.frozen: dict[str, Any] = {}

    def open(self) -> None:
        """Load the models."""
        self.reset()
        _without_dropout(self.engine.module)
        for letter, path in self.paths.items():
            self.frozen[letter] = self._frozen(path)

    def logprobs(self, shard: Shard, of: str) -> Tensor:
        """Float32, of the shard's actions in order."""
        engine: Any = self.frozen.get(of, self.engine)
        with engine.eval_mode():
            output = engine.infer_batch(self._data(shard), loss_function=None)
        return _of_actions(output, shard)

    def step(self, shard: Shard, psi: Psi, lr: float) -> ShardReport:
        """Forward, backward and update; without the update where the gradient is not finite."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.set_loss_fn(partial(policy_loss, psi=psi))
        with self.engine.train_mode():
            output = self.engine.train_batch(self._data(shard), loss_function=self.loss_fn)
        self.engine.optimizer_zero_grad()
        return ShardReport(
            loss=sum(output["loss"]),
            grad_norm=float(output["metrics"]["grad_norm"]),
            logprobs=_of_actions(output, shard),
        )

    def weights(self) -> dict[str, Tensor]:
        """The whole policy in float32, on rank 0; nothing elsewhere."""
        found: dict[str, Any] = get_model_state_dict(self.engine.module, options=FULL)
        return found

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state as "<parameter>/<moment>", on rank 0; nothing before a step."""
        optimizer = self.engine.optimizer
        if not optimizer.state:
            return {}
        state: Any = get_optimizer_state_dict(self.engine.module, optimizer, options=FULL)
        return {
            f"{name}/{moment}": torch.as_tensor(value)
            for name, moments in state.get("state", {}).items()
            for moment, value in moments.items()
        }

    def restore(self, weights: dict[str, Any], moments: dict[str, Tensor], begun: bool) -> None:
        """Take over what `weights` and `moments` returned, which rank 0 is given. begun: whether
        there are moments."""
        module, optimizer = self.engine.module, self.engine.optimizer
        set_model_state_dict(module, weights, options=SPREAD)
        if not begun:
            optimizer.state.clear()
            return
        state: dict[str, dict[str, Tensor]] = {}
        for key, tensor in moments.items():
            name, _, moment = key.rpartition("/")
            state.setdefault(name, {})[moment] = tensor
        groups = get_optimizer_state_dict(module, optimizer, options=FULL).get("param_groups", [])
        saved: dict[str, Any] = {"state": state, "param_groups": groups} if state else {}
        set_optimizer_state_dict(module, optimizer, saved, options=SPREAD)

    def _frozen(self, path: str) -> Any:
        asked = {**self.settings, "model": {**self.settings["model"], "path": path}}
        asked["engine"] = {**asked["engine"], "forward_only": True}
        model = _made(HFModelConfig, asked, "model")
        model.model_type = "language_model"
        made = EngineRegistry.new(
            model_type="language_model",
            backend=asked["engine"]["strategy"],
            model_config=model,
            engine_config=_made(FSDPEngineConfig, asked, "engine"),
            optimizer_config=None,
            checkpoint_config=CheckpointConfig(),
        )
        made.initialize()
        return made

    def _data(self, shard: Shard) -> TensorDict:
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
                "max_token_len_per_gpu": shard.token_budget,
                "return_model_output": True,
            },
        )


def policy_loss(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None, *, psi: Psi
) -> tuple[Tensor, dict[str, float]]:
    """The one loss, - sum_t sg[psi_t] * log pi_t, times the ranks that FSDP averages over. Where a
    log-prob is not finite it is NaN, which verl answers with no update on any rank."""
    logprobs = model_output["log_probs"].values()  # at each position that of the next token
    chosen = data["loss_mask"].values().bool()
    if not chosen.any():
        return (logprobs * 0.0).sum(), {}
    p = logprobs[chosen].float()
    current = p.detach().cpu()
    if not current.isfinite().all():
        return p.sum() * math.nan, {}
    weight = psi(current, data["place"].values()[chosen].cpu()).to(p)
    ranks = torch.distributed.get_world_size(dp_group)
    return -(weight * p).sum() * ranks, {}


def _of_actions(output: dict[str, Any], shard: Shard) -> Tensor:
    rows = output["model_output"]["log_probs"].unbind()
    found = [row[at.to(row.device)] for row, at in zip(rows, shard.states, strict=True)]
    return torch.cat(found).float().cpu()


def _jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _made(kind: type, settings: Settings, part: str) -> Any:
    """A configuration of verl, or one sentence where this release has no such setting."""
    known = {field.name for field in fields(kind)}
    for key in settings[part]:
        if key not in known:
            raise ConfigError(
                f"learner.kind = 'verl': {kind.__name__} of the verl that is installed has no "
                f"{key!r}; install verl>=0.9,<0.11"
            )
    return kind(**settings[part])


def _without_dropout(module: torch.nn.Module) -> None:
    """verl trains in training mode, where dropout would make sampler and learner disagree."""
    for each in module.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
        for name in _rates(each):
            setattr(each, name, 0.0)


def _rates(module: torch.nn.Module) -> Iterator[str]:
    """Attributes that say a rate of dropout, as attention layers of transformers have them."""
    for name, value in vars(module).items():
        if name.endswith("dropout") and isinstance(value, float):
            yield name
