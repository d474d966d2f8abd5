"""The learner for many GPUs: verl's FSDP2 workers under Ray, with this package's objective.

Owns the workers, which own weights and optimizer; the model it is given is a copy that it keeps up
to date, for the policy server and for checkpoints. Always true between calls: that copy is the
policy; every rank has done the same calls. The psi of a step travels to the workers and is computed
there, on whole rows, so it must be picklable: no lambda over open files or servers.

Rows are dealt to the ranks by length and filled up with rows of no weight, of which the loss, a sum
over tokens with weights fixed beforehand, does not notice anything. Checkpoints are those of
`TorchLearner`, so a run may change its learner and its number of GPUs; whole weights and moments
pass through the memory of this process, which bounds the model it can train.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.batch import Batch, Row
from agentrl.algorithms.learners.base import Psi, Scored, StepReport, Supply, ValueTerms
from agentrl.algorithms.learners.optimizer import FILE, MASTER, NARROW, Optimizer
from agentrl.algorithms.learners.verl_settings import VERL, Settings
from agentrl.algorithms.model import Tokenizer
from agentrl.algorithms.weights import copy_weights, read_policy
from agentrl.errors import ConfigError, PolicyError, TrainingError

FILLER = Row(
    tokens=torch.zeros(2, dtype=torch.int64),
    actions=torch.empty(0, dtype=torch.int64),
    logprobs=torch.empty(0),
    temperature=torch.empty(0),
    transition=torch.empty(0, dtype=torch.int64),
)


class VerlLearner:
    """AdamW on all weights of one model, sharded over the workers.

    model: the copy, as the workers load it from `settings["model"]["path"]`. frozen: directories or
    hub names of the models behind streams q and t. Raises ConfigError without a verl that it knows
    or the GPUs asked for, PolicyError for a model that the workers cannot load."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        settings: Settings,
        *,
        frozen: Mapping[Literal["q", "t"], str] | None = None,
    ) -> None:
        check_installed()
        self.model, self.tokenizer, self.settings = model.eval(), tokenizer, settings
        names = dict(frozen or {})
        self.supplies = frozenset[Supply]({"o", "b", *names})
        placed = settings["ray"]
        self.ranks: int = placed["nodes"] * placed["gpus_per_node"]
        self.timeout: float = placed["timeout"]
        self.token_budget: int = settings["engine"]["max_token_len_per_gpu"]
        self.group: Any = None
        self.pool: Any = None
        self.started_ray = False
        try:
            self._start(placed, {str(letter): name for letter, name in names.items()})
        except BaseException:
            self.close()
            raise

    def logprobs(self, batch: Batch, of: Scored = "o") -> Tensor:
        """Log-probs of every action token at its sampling temperature, float32 [N], no graph."""
        if of not in self.supplies:
            raise PolicyError(f"the learner has no model for stream {of}")
        shards = self._shards(batch)
        return _gathered(batch, shards, self._call("logprobs", shards, [of] * self.ranks))

    def top(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """None: raises PolicyError."""
        raise PolicyError("the verl learner gives log-probs of sampled tokens only (supply k)")

    def values(self, batch: Batch) -> Tensor:
        """There is no critic."""
        raise PolicyError("the verl learner has no critic (stream v); set learner.kind = 'torch'")

    def step(
        self, batch: Batch, psi: Psi, *, lr: float, critic: ValueTerms | None = None
    ) -> StepReport:
        """One forward, backward and update on psi, then the copy follows. A log-prob or gradient
        that is not finite changes nothing.

        Raises TrainingError when a worker fails or does not answer in time; the workers are then
        stopped, because the others wait for it."""
        if critic is not None:
            self.values(batch)
        if not batch.n_tokens:
            return StepReport(
                loss=0.0, grad_norm=0.0, logprobs=torch.empty(0), tokens=0, applied=False
            )
        shards = self._shards(batch)
        every = self.ranks
        reports = self._call("step", shards, [self._sent(psi)] * every, [lr] * every)
        loss = sum(report.loss for report in reports) / every
        norm = reports[0].grad_norm
        applied = math.isfinite(norm + loss)
        if applied:
            self._follow()
        return StepReport(
            loss=loss,
            grad_norm=norm,
            logprobs=_gathered(batch, shards, [report.logprobs for report in reports]),
            tokens=sum(len(row) for shard in shards for row in shard.tokens),
            applied=applied,
        )

    def save(self, directory: Path) -> None:
        """Write weights, tokenizer and optimizer, as `TorchLearner` does.

        Not atomic by itself; `checkpoint.save_checkpoint` makes it so."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        own = dict(self.model.named_parameters())
        moments = self._call("moments")[0]
        tensors = {key: value for key, value in moments.items() if key.rpartition("/")[0] in own}
        if self.model.dtype in NARROW:
            weights = self._call("weights")[0]
            tensors |= {f"{name}/{MASTER}": weights[name] for name in own}
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        save_file(tensors, directory / FILE, metadata={"optimizer": "adamw"})

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises PolicyError, with nothing changed, for a checkpoint of
        another model or a half-written one."""
        weights, own = read_policy(self.model, directory), self.model.state_dict()
        read = Optimizer(dict(self.model.named_parameters())).read(directory)
        masters = {key: value for key, value in read.items() if key.endswith(f"/{MASTER}")}
        moments = {key: value for key, value in read.items() if key not in masters}
        weights |= {key.rpartition("/")[0]: value for key, value in masters.items()}
        # Tied weights are one parameter under two names, of which masters have the first alone.
        first = {p.data_ptr(): name for name, p in self.model.named_parameters()}
        names = {name: first.get(tensor.data_ptr(), name) for name, tensor in own.items()}
        weights = {name: weights[names[name]].float() for name in own}
        nothing: list[dict[str, Tensor]] = [{}] * (self.ranks - 1)
        begun = [bool(moments)] * self.ranks
        self._call("restore", [weights, *nothing], [moments, *nothing], begun)
        self._follow()

    def close(self) -> None:
        """Stop the workers, and Ray if it was started here. May be called again."""
        import ray

        group, self.group = self.group, None
        for worker in group.workers if group else []:
            ray.kill(worker)
        pool, self.pool = self.pool, None
        for reserved in (pool.pgs if pool else None) or []:
            ray.util.remove_placement_group(reserved)
        if self.started_ray:
            self.started_ray = False
            ray.shutdown()

    def _start(self, placed: Mapping[str, Any], frozen: dict[str, str]) -> None:
        import ray
        from verl.single_controller.ray import (
            RayClassWithInitArgs,
            RayResourcePool,
            RayWorkerGroup,
        )
        from verl.utils.device import get_device_name

        from agentrl.algorithms.learners.verl_worker import PolicyWorker

        if not ray.is_initialized():
            address = placed["address"] or os.environ.get("RAY_ADDRESS")
            try:
                ray.init(address=address, include_dashboard=False, log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"learner.verl.address = {address!r}: Ray cannot be reached or started there "
                    f"({str(error).splitlines()[0]}); give the address that `ray start` printed"
                ) from None
            self.started_ray = True
        self._find_room(placed)
        self.pool = RayResourcePool(
            [placed["gpus_per_node"]] * placed["nodes"], use_gpu=True, max_colocate_count=1
        )
        start = RayClassWithInitArgs(
            cls=ray.remote(PolicyWorker), settings=self.settings, frozen=frozen
        )
        self.group = RayWorkerGroup(
            resource_pool=self.pool,
            ray_cls_with_init=start,
            device_name=get_device_name(),
            ray_wait_register_center_timeout=math.ceil(self.timeout),
        )
        self._call("open")

    def _find_room(self, placed: Mapping[str, Any]) -> None:
        """Wait for the GPUs of a run that has just ended; verl itself would wait without end."""
        import ray

        each = placed["gpus_per_node"]
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        asked = f"learner.verl: {placed['nodes']} nodes with {each} GPUs are asked for, and "
        if sum(int(node.get("GPU", 0)) // each for node in alive) < placed["nodes"]:
            has = ", ".join(str(int(node.get("GPU", 0))) for node in alive)
            raise ConfigError(f"{asked}Ray's nodes have {has}; lower them or add nodes to it")
        until = time.monotonic() + min(self.timeout, 60.0)
        while ray.available_resources().get("GPU", 0) < self.ranks:
            if time.monotonic() > until:
                free = int(ray.available_resources().get("GPU", 0))
                raise ConfigError(f"{asked}Ray has {free} that are free; wait for the others' end")
            time.sleep(0.2)

    def _call(self, verb: str, *arguments: list[Any]) -> list[Any]:
        """What every rank answers to a verb; arguments: a list of one for each rank."""
        import ray

        if self.group is None:
            raise TrainingError("verl's workers are stopped; start the run again")
        try:
            answers: list[Any] = ray.get(
                self.group.execute_all_async(verb, *arguments), timeout=self.timeout
            )
        except ray.exceptions.GetTimeoutError:
            self.close()
            raise TrainingError(
                f"verl's workers did not answer {verb!r} within learner.verl.timeout = "
                f"{self.timeout:g} s; raise it, or see Ray's logs of the workers"
            ) from None
        except ray.exceptions.RayError as error:
            self.close()
            reason = [line.strip() for line in str(error).splitlines() if line.strip()]
            kind = PolicyError if verb == "open" else TrainingError
            raise kind(f"a worker of verl failed in {verb!r}: {reason[-1][:300]}") from None
        return answers

    def _sent(self, psi: Psi) -> Any:
        """Where the workers of a node find psi, which is sent to it once."""
        import ray

        try:
            return ray.put(psi)
        except TypeError as error:
            raise TrainingError(
                "the algorithm cannot be sent to verl's workers, because something in it cannot be "
                f"pickled ({str(error).strip().splitlines()[0]}); take that out of its functions"
            ) from None

    def _follow(self) -> None:
        """Bring the copy up to date."""
        copy_weights(self.model, self._call("weights")[0])

    def _shards(self, batch: Batch) -> list[Any]:
        from agentrl.algorithms.learners.verl_worker import Shard

        offsets = batch.row_offsets.tolist()
        rows = batch.rows
        longest = max((int(row.actions[-1]) + 1 for row in rows), default=2)
        shards = []
        for chosen in dealt(rows, self.ranks):
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


def dealt(rows: Sequence[Row], ranks: int) -> list[list[int]]:
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


def check_installed() -> None:
    """Raises ConfigError where verl is missing or of a release that is not known."""
    missing = [name for name in ("verl", "ray", "tensordict") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"learner.kind = 'verl': {missing[0]} is not installed: pip install 'agentrl[verl]'"
        )
    found = importlib.metadata.version("verl")
    release = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not VERL[0] <= release < VERL[1]:
        raise ConfigError(
            f"learner.kind = 'verl': verl {found} is not one that is known; install "
            "'verl>=0.9,<0.11'"
        )


def _temperature(row: Row) -> float:
    found = sorted(set(row.temperature.tolist()))
    if len(found) > 1:
        raise PolicyError(
            f"the verl learner computes a row at one temperature, and one was sampled at {found}; "
            "set learner.kind = 'torch', or one temperature for all calls of an agent"
        )
    return float(found[0]) if found else 1.0


def _gathered(batch: Batch, shards: Sequence[Any], parts: Sequence[Tensor]) -> Tensor:
    """What the ranks say of their actions, float32 [N] in token order."""
    whole = torch.empty(batch.n_tokens)
    for shard, part in zip(shards, parts, strict=True):
        whole[torch.cat(shard.index)] = part
    return whole
