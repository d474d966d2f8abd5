"""The learner for many GPUs: verl's FSDP2 workers under Ray, with this package's objective.

Owns the workers, which own weights and optimizers; the model (or adapter) it is given is a copy
that it keeps up to date, for the policy server and for checkpoints. Always true between calls: that
copy is the policy. The psi of a step travels to the workers and is computed there, on whole rows,
so it must be picklable: no lambda over open files or servers.

Rows are dealt to the ranks by length and filled up with rows of no weight, of which the loss, a sum
over tokens with weights fixed beforehand, does not notice anything. Checkpoints are those of
`TorchLearner`, so a run may change its learner and its number of GPUs; whole weights and moments
pass through the memory of this process, which bounds the model it can train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear, ModuleDict
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.learners import critic as critics
from agentrl.algorithms.learners import reference
from agentrl.algorithms.learners.base import Psi, Scored, StepReport, Supply
from agentrl.algorithms.learners.optimizer import FILE, MASTER, NARROW, read_state
from agentrl.algorithms.learners.verl.group import VerlWorkers
from agentrl.algorithms.learners.verl.settings import VerlSettings, check_installed
from agentrl.algorithms.model.load import (
    Tokenizer,
    copy_weights,
    no_progress_bars,
    read_policy,
    read_weights,
)
from agentrl.algorithms.model.lora import Adapters
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.errors import PolicyError
from agentrl.types import POLICY

FILLER = TokenRow(
    tokens=torch.zeros(2, dtype=torch.int64),
    actions=torch.empty(0, dtype=torch.int64),
    logprobs=torch.empty(0),
    temperature=torch.empty(0),
    transition=torch.empty(0, dtype=torch.int64),
)


@dataclass(frozen=True, slots=True)
class FrozenOnWorkers:
    """A model on the workers that only scores. every: training steps after which it becomes the
    policy as it is; 0: never."""

    workers: VerlWorkers
    letter: str
    every: int = 0

    def finish(self, step: int) -> None:
        """Training step number `step` is done."""
        if self.every and (step + 1) % self.every == 0:
            self.workers.all("follow", self.letter)


class VerlLearner:
    """AdamW on the weights of one model, or on an adapter, sharded over the workers.

    model: the copy, as the workers load it from `settings["model"]["path"]`. adapters: of that
    model; the one named `policy` is learned. frozen: directories or hub names of the models behind
    streams q and t; every: see `FrozenOnWorkers`, of q. Raises ConfigError without a
    supported verl or the GPUs asked for, PolicyError for a model that the workers cannot load."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        settings: VerlSettings,
        *,
        adapters: Adapters | None = None,
        policy: str = POLICY,
        frozen: Mapping[Literal["q", "t"], str] | None = None,
        every: int = 0,
    ) -> None:
        check_installed()
        self.model, self.tokenizer, self.settings = model.eval(), tokenizer, settings
        self.adapters, self.policy = adapters, policy
        names: dict[Literal["q", "t"], str] = dict(frozen or {})
        values: tuple[Literal["v"], ...] = ("v",) if settings["critic"] else ()
        own_base: tuple[Literal["q"], ...] = ("q",) if adapters is not None else ()
        self.supplies = frozenset[Supply]({"o", "b", *names, *values, *own_base})
        self.token_budget: int = settings["engine"]["max_token_len_per_gpu"]
        self.critic = _critic_shapes(settings["critic"], model.dtype)
        self.workers = VerlWorkers(settings, {str(letter): name for letter, name in names.items()})
        self.frozen = {
            letter: FrozenOnWorkers(self.workers, letter, every if letter == "q" else 0)
            for letter in names
        }
        if adapters is not None:
            try:
                self._restore("o", self._learned(), {})
            except BaseException:
                self.close()
                raise

    def logprobs(self, batch: Batch, of: Scored = "o") -> Tensor:
        """Log-probs of every action token at its sampling temperature, float32 [N], no graph."""
        if of not in self.supplies:
            raise PolicyError(f"the learner has no model for stream {of}")
        shards = self._shards(batch)
        answers = self.workers.each("logprobs", shards, [of] * len(shards))
        return _in_token_order(batch, shards, answers)

    def top(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """None: raises PolicyError."""
        raise PolicyError("the verl learner gives log-probs of sampled tokens only (supply k)")

    def values(self, batch: Batch) -> Tensor:
        """The critic's value of the state before every action token, float64 [N], no graph."""
        if self.critic is None:
            raise PolicyError("the learner has no critic (stream v)")
        shards = self._shards(batch)
        return _in_token_order(batch, shards, self.workers.each("values", shards)).double()

    def step(
        self,
        batch: Batch,
        psi: Psi,
        *,
        lr: float,
        critic: ValueTerms | None = None,
        eta: Tensor | None = None,
    ) -> StepReport:
        """One forward, backward and update on psi, and of the critic on its terms, then the copy
        follows. A log-prob, value or gradient that is not finite changes nothing.

        metrics: critic/* and memory/*peak_mb (of the fullest worker) as of `TorchLearner`, and
        throughput/tflops and throughput/mfu, means of the workers.
        Raises TrainingError when a worker fails or does not answer in time; the workers are then
        stopped."""
        if critic is not None and self.critic is None:
            raise PolicyError("the learner has no critic (stream v)")
        if eta is not None:
            raise PolicyError("the verl learner gives no gradient of the entropy (supply e)")
        if not batch.n_tokens:
            return StepReport(
                loss=0.0, grad_norm=0.0, logprobs=torch.empty(0), tokens=0, applied=False
            )
        shards, every = self._shards(batch), self.workers.ranks
        given = [self.workers.sent(thing) for thing in (psi, critic)]
        reports = self.workers.each(
            "step", shards, [given[0]] * every, [lr] * every, [given[1]] * every
        )
        if reports[0].applied:
            self._follow()
        columns = {
            name: _in_token_order(
                batch, shards, [report.policy.columns[name] for report in reports]
            )
            for name in ("log_probs", "entropy")
        }
        metrics = _metrics([report.metrics for report in reports])
        if critic is not None:
            live = max(1, int((critic.weight > 0).sum()))
            parts = [report.critic for report in reports]
            metrics["critic/loss"] = sum(part.loss for part in parts)
            metrics["critic/clip_fraction"] = sum(part.clipped for part in parts) / live
            metrics["critic/grad_norm"] = parts[0].grad_norm
        return StepReport(
            loss=sum(report.policy.loss for report in reports),
            grad_norm=reports[0].policy.grad_norm,
            logprobs=columns["log_probs"],
            entropy=columns["entropy"],
            tokens=sum(sum(shard.lengths) for shard in shards),
            applied=reports[0].applied,
            metrics=metrics,
        )

    def save(self, directory: Path) -> None:
        """Write weights, tokenizer, optimizer, critic and a reference that follows the policy, as
        `TorchLearner` does.

        Not atomic by itself; `checkpoint.save_checkpoint` makes it so."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.adapters is None:
            with no_progress_bars():
                self.model.save_pretrained(directory)
        else:
            self.adapters.save(self.policy, directory)
        self.tokenizer.save_pretrained(directory)
        self._save_optimizer("o", self._learned(), directory)
        if self.critic is not None:
            own, folder = dict(self.critic.named_parameters()), directory / critics.FOLDER
            folder.mkdir(exist_ok=True)
            self._save_weights("v", own, folder / critics.WEIGHTS)
            self._save_optimizer("v", own, folder)
        if self._follows():
            own = dict(self.model.named_parameters())
            self._save_weights("q", own, directory / reference.WEIGHTS)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises PolicyError, with nothing changed, for a checkpoint of
        another model or a half-written one."""
        if self.adapters is None:
            weights = read_policy(self.model, directory)
        else:
            weights = self.adapters.read(self.policy, directory)
        state = read_state(directory, self._learned(), "adamw")
        if self.critic is not None:
            folder = directory / critics.FOLDER
            own = dict(self.critic.named_parameters())
            values = read_weights(self.critic, folder / critics.WEIGHTS)
            of_values = read_state(folder, own, "adamw")
        if self._follows():
            followed = read_weights(self.model, directory / reference.WEIGHTS)
        self._restore("o", weights, state)
        if self.critic is not None:
            self._restore("v", values, of_values)
        if self._follows():
            self._restore("q", followed, {})
        self._follow()

    def close(self) -> None:
        """Stop the workers, and Ray if it was started here. May be called again."""
        self.workers.close()

    def _learned(self) -> dict[str, Tensor]:
        """What is learned, by the names of checkpoints, of the copy."""
        if self.adapters is None:
            return dict(self.model.named_parameters())
        return dict(self.adapters.parameters(self.policy))

    def _follows(self) -> bool:
        return "q" in self.frozen and self.frozen["q"].every > 0

    def _follow(self) -> None:
        """Bring the copy up to date."""
        weights = self.workers.all("weights", "o")[0]
        if self.adapters is None:
            copy_weights(self.model, weights)
        else:
            self.adapters.restore(self.policy, weights)

    def _save_weights(self, of: str, own: Mapping[str, Tensor], file: Path) -> None:
        weights = self.workers.all("weights", of)[0]
        save_file({name: weights[name].to(p.dtype).contiguous() for name, p in own.items()}, file)

    def _save_optimizer(self, of: str, own: Mapping[str, Tensor], directory: Path) -> None:
        moments = self.workers.all("moments", of)[0]
        tensors = {key: value for key, value in moments.items() if key.rpartition("/")[0] in own}
        narrow = [name for name, parameter in own.items() if parameter.dtype in NARROW]
        weights = self.workers.all("weights", of)[0] if narrow else {}
        tensors |= {f"{name}/{MASTER}": weights[name] for name in narrow}
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        save_file(tensors, directory / FILE, metadata={"optimizer": "adamw"})

    def _restore(self, of: str, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Give the workers weights, or masters where there are any, and moments."""
        moments = {key: value for key, value in state.items() if not key.endswith(f"/{MASTER}")}
        masters = {
            key.rpartition("/")[0]: value for key, value in state.items() if key not in moments
        }
        found = {**weights, **masters}
        if of in "oq" and self.adapters is None:
            # Tied weights are one parameter under two names, of which masters and the files of a
            # reference have the first alone.
            first = {p.data_ptr(): name for name, p in self.model.named_parameters()}
            own = {n: first.get(p.data_ptr(), n) for n, p in self.model.state_dict().items()}
            found = {name: found[source] for name, source in own.items() if source in found}
        whole = {name: tensor.detach().float() for name, tensor in found.items()}
        rest: list[dict[str, Tensor]] = [{}] * (self.workers.ranks - 1)
        every = self.workers.ranks
        self.workers.each(
            "restore", [of] * every, [whole, *rest], [moments, *rest], [bool(moments)] * every
        )

    def _shards(self, batch: Batch) -> list[Any]:
        from agentrl.algorithms.learners.verl.worker import Shard

        offsets = batch.row_offsets.tolist()
        rows = batch.rows
        longest = max((int(row.actions[-1]) + 1 for row in rows), default=2)
        shards = []
        for chosen in deal_rows(rows, self.workers.ranks):
            mine = [rows[i] if i >= 0 else FILLER for i in chosen]
            starts = [offsets[i] if i >= 0 else 0 for i in chosen]
            ends = [int(row.actions[-1]) + 1 if len(row.actions) else 2 for row in mine]
            shards.append(
                Shard(
                    tokens=[row.tokens[:end] for row, end in zip(mine, ends, strict=True)],
                    states=[row.actions - 1 for row in mine],
                    index=[
                        torch.arange(start, start + len(row.actions))
                        for row, start in zip(mine, starts, strict=True)
                    ],
                    temperature=torch.tensor([_temperature(row) for row in mine]),
                    token_budget=max(self.token_budget, longest),
                )
            )
        return shards


def deal_rows(rows: Sequence[TokenRow], ranks: int) -> list[list[int]]:
    """Indices of rows for each rank, equally many, of about as many tokens; -1 fills up."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    order += [-1] * (-len(rows) % ranks)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for turn in range(0, len(order), ranks):
        # Back and forth, so that nobody always has the longest.
        there = range(ranks) if turn // ranks % 2 == 0 else range(ranks - 1, -1, -1)
        for rank, row in zip(there, order[turn : turn + ranks], strict=True):
            hands[rank].append(row)
    return hands


def _critic_shapes(critic: Mapping[str, Any], dtype: torch.dtype) -> ModuleDict | None:
    """What the critic's part of a checkpoint has, without its weights: as `ValueModel.modules`."""
    if not critic:
        return None
    config = AutoConfig.from_pretrained(critic["model"]["path"])
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(config, dtype=dtype).base_model
        head = Linear(config.get_text_config().hidden_size, 1)
    return ModuleDict({"head": head, "decoder": decoder})


def _temperature(row: TokenRow) -> float:
    found = sorted(set(row.temperature.tolist()))
    if len(found) > 1:
        raise PolicyError(
            f"the verl learner computes a row at one temperature, and one was sampled at {found}; "
            "set learner.kind = 'torch', or one temperature for all calls of an agent"
        )
    return float(found[0]) if found else 1.0


def _metrics(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of all ranks: the largest peak, and of the others the mean."""
    return {
        name: max(found) if "peak" in name else sum(found) / len(found)
        for name in ranks[0]
        if (found := [each[name] for each in ranks if name in each])
    }


def _in_token_order(batch: Batch, shards: Sequence[Any], parts: Sequence[Tensor]) -> Tensor:
    """What the ranks say of their actions, float32 [N] in token order."""
    whole = torch.empty(batch.n_tokens)
    for shard, part in zip(shards, parts, strict=True):
        whole[torch.cat(shard.index)] = part
    return whole
