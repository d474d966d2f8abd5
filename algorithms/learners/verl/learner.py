"""The learner for many GPUs: verl's workers under Ray, with this package's objective.

Owns the Ray actors, the GPUs reserved for them and, if it started one, Ray itself; the workers own
weights and optimizers. It updates its copy of the model (or adapter) after every step, for the
policy server and for checkpoints. Invariant: between calls, that copy is the policy; every rank
has run the same calls; after a failed call or a timeout the workers are stopped, because the other
ranks wait for the missing one inside a collective operation. The workers compute psi, on whole
rows, so it must be picklable: no lambda over open files or servers.

Rows are distributed over the ranks by length and padded with rows without actions, which do not
change the loss, a sum over tokens with weights fixed beforehand. Checkpoints are those of
`TorchLearner`, so a run may change its learner and its number of GPUs; whole weights and moments
pass through the memory of this process, which limits the size of the model. With an engine other
than FSDP2, a checkpoint has verl's own optimizer state, which only the same engine reads.
"""

from __future__ import annotations

import math
import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear, ModuleDict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.auxiliary import CRITIC, REFERENCE, check_vocabulary
from agentrl.algorithms.learners.base import (
    Frozen,
    LossCoefficients,
    PolicyWeights,
    Scored,
    StepReport,
    critic_metrics,
    fixed_coefficients,
)
from agentrl.algorithms.learners.factory import frozen_sources
from agentrl.algorithms.learners.optimizer import MASTER, NARROW, read_state, save_state
from agentrl.algorithms.learners.verl.settings import FSDP2, VerlSettings, check_installed, settings
from agentrl.algorithms.learners.verl.shards import Shard, in_token_order, shards_of
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.load import Adapters, copy_weights, read_weights
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.objective.ratios import LearnerOutput
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError, PolicyError, TrainingError
from agentrl.core.types import POLICY, one_line

CALL_TIMEOUT = 1800.0  # seconds of one call, such as an update, or loading the model
FREE_WITHIN = 60.0  # seconds to wait for the GPUs of a run that has just ended


class VerlWorkers:
    """One worker on each GPU, with its models loaded. frozen: directories or hub names of the
    frozen models, by name.

    Raises ConfigError without Ray or the requested GPUs, PolicyError for a model that the workers
    cannot load."""

    def __init__(self, settings: VerlSettings, frozen: Mapping[str, str]) -> None:
        placed = settings["ray"]
        self.ranks: int = placed["nodes"] * placed["gpus_per_node"]
        self.timeout = CALL_TIMEOUT
        self.group: Any = None
        self.pool: Any = None
        self.started_ray = False
        try:
            self._start(settings, dict(frozen))
        except BaseException:
            self.close()
            raise

    def all(self, verb: str, *arguments: Any) -> list[Any]:
        """Call a method with the same arguments on every rank; returns the results by rank."""
        return self.each(verb, *([argument] * self.ranks for argument in arguments))

    def each(self, verb: str, *arguments: list[Any]) -> list[Any]:
        """Call a method on every rank; arguments: lists with one value per rank.

        Raises TrainingError when a worker fails or does not answer in time."""
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
                f"verl's workers did not answer {verb!r} within {self.timeout:g} s; see Ray's logs "
                "of the workers"
            ) from None
        except ray.exceptions.RayError as error:
            self.close()
            if verb != "open" and isinstance(error, ray.exceptions.RayActorError):
                raise TrainingError(
                    f"a worker of verl died in {verb!r} ({_exit(error)}); the same command goes on "
                    "after the last checkpoint"
                ) from None
            reason = [line.strip() for line in str(error).splitlines() if line.strip()]
            kind = PolicyError if verb == "open" else TrainingError
            raise kind(f"a worker of verl failed in {verb!r}: {reason[-1][:300]}") from None
        return answers

    def sent(self, thing: Any) -> Any:
        """A reference to an object in Ray's store. Raises TrainingError if it cannot be pickled."""
        import ray

        try:
            return ray.put(thing)
        except TypeError as error:
            raise TrainingError(
                "the algorithm cannot be sent to verl's workers, because something in it cannot be "
                f"pickled ({str(error).strip().splitlines()[0]}); take that out of its functions"
            ) from None

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

    def _start(self, settings: VerlSettings, frozen: dict[str, str]) -> None:
        import ray
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        from verl.utils.device import get_device_name

        from agentrl.algorithms.learners.verl.worker import PolicyWorker, check_options

        check_options(settings)
        placed = settings["ray"]
        if not ray.is_initialized():
            _join(os.environ.get("RAY_ADDRESS"))
            self.started_ray = True
        self._find_room(placed)
        self.pool = RayResourcePool(
            [placed["gpus_per_node"]] * placed["nodes"], use_gpu=True, max_colocate_count=1
        )
        start = RayClassWithInitArgs(cls=ray.remote(PolicyWorker), settings=settings, frozen=frozen)
        self.group = RayWorkerGroup(
            resource_pool=self.pool,
            ray_cls_with_init=start,
            device_name=get_device_name(),
            ray_wait_register_center_timeout=math.ceil(self.timeout),
        )
        self.all("open")

    def _find_room(self, placed: Mapping[str, Any]) -> None:
        """Wait for the GPUs of a run that has just ended; verl itself would wait forever."""
        import ray

        per_node = placed["gpus_per_node"]
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        request = f"learner.verl: {placed['nodes']} nodes with {per_node} GPUs are asked for, and "
        if sum(int(node.get("GPU", 0)) // per_node for node in alive) < placed["nodes"]:
            has = ", ".join(str(int(node.get("GPU", 0))) for node in alive)
            raise ConfigError(f"{request}Ray's nodes have {has}; lower them or add nodes to it")
        until = time.monotonic() + min(self.timeout, FREE_WITHIN)
        while ray.available_resources().get("GPU", 0) < self.ranks:
            if time.monotonic() > until:
                free = int(ray.available_resources().get("GPU", 0))
                raise ConfigError(
                    f"{request}Ray has {free} that are free; wait for the others' end"
                )
            time.sleep(0.2)


def _join(address: str | None) -> None:
    """Connect to the Ray at an address, or start one."""
    import ray

    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    except Exception as error:  # noqa: BLE001 - Ray has no class for this
        why = (str(error).splitlines() or [type(error).__name__])[0]
        if not address:
            raise ConfigError(f"learner.verl: Ray cannot be started here ({why})") from None
        where = f"RAY_ADDRESS = {address!r}"
        if "AuthenticationError" in "".join(traceback.format_exception(error)):
            raise ConfigError(
                f"{where}: Ray wants its token there; set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN_PATH, or RAY_AUTH_TOKEN, as for its `ray start`"
            ) from None
        raise ConfigError(
            f"{where}: Ray cannot be reached there ({why}); give the address that `ray start` "
            "printed"
        ) from None


def _exit(error: Exception) -> str:
    """Why a worker ended, as Ray reports it."""
    text = str(error).strip()
    if "its node has died" in text:
        address = re.search(r"^\s*ip: (\S+)", text, re.MULTILINE)
        where = f"its node {address[1]}" if address else "its node"
        return f"{where} is lost: {text.splitlines()[-1].rpartition(': ')[2]}"[:200]
    _, _, detail = text.partition("Worker exit detail: ")
    return (detail or text).strip().split(". ")[0].splitlines()[0][:200]


ENGINE = "verl"  # subfolder with verl's checkpoint, for engines other than FSDP2


@dataclass(frozen=True, slots=True)
class FrozenOnWorkers:
    """A frozen model on the workers. every: number of training steps after which the current policy
    is copied into it; 0: never."""

    workers: VerlWorkers
    name: str
    every: int = 0

    def finish(self, step: int) -> None:
        """Called after training step number `step`: copies the policy if it is time."""
        if self.every and (step + 1) % self.every == 0:
            self.workers.all("follow", self.name)


class VerlLearner(PolicyWeights):
    """AdamW on the weights of one model, or on an adapter, sharded over the workers."""

    frozen: dict[Frozen, FrozenOnWorkers]

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        settings: VerlSettings,
        *,
        adapters: Adapters | None = None,
        policy: str = POLICY,
        frozen: Mapping[Frozen, str] | None = None,
        every: int = 0,
    ) -> None:
        """model: a copy of the model that the workers load from `settings["model"]["path"]`.
        adapters: train only the adapter `policy` of that model. frozen: directories or hub names of
        the reference and the teacher; every: see `FrozenOnWorkers`, of the reference. Raises
        ConfigError without a supported verl or the requested GPUs, PolicyError for a model that the
        workers cannot load."""
        check_installed()
        paths = dict(frozen or {})
        values: tuple[LearnerOutput, ...] = ("values",) if settings["critic"] else ()
        self.strategy: str = settings["engine"]["strategy"]
        self.undoable = self.strategy == FSDP2
        super().__init__(model, tokenizer, adapters, policy, (*paths, *values))
        self.token_budget: int = settings["engine"]["max_token_len_per_gpu"]
        self.critic = _critic_shapes(settings["critic"], model.dtype)
        self.workers = VerlWorkers(settings, {str(name): path for name, path in paths.items()})
        self.layout: list[tuple[int, bool]] = self.workers.all("layout")
        self.frozen = {
            name: FrozenOnWorkers(self.workers, name, every if name == "reference" else 0)
            for name in paths
        }
        if adapters is not None:
            try:
                self._restore("current", self.parameters(), {})
            except BaseException:
                self.close()
                raise

    def logprobs(self, batch: Batch, of: Scored = "current") -> Tensor:
        self.check_output("old" if of == "current" else of)
        shards = self._shards(batch)
        answers = self._each("logprobs", shards, of)
        return in_token_order(batch, shards, answers)

    def top(self, batch: Batch, k: int, of: Scored = "current") -> tuple[Tensor, Tensor]:
        """Raise PolicyError: verl's workers compute no such log-probs."""
        raise PolicyError("the verl learner gives log-probs of sampled tokens only, no top_tokens")

    def topk_logprobs(self, batch: Batch, of: Scored = "current") -> Tensor:
        """Raise PolicyError: verl's workers compute no such log-probs."""
        return self.top(batch, 1, of)[1]

    def values(self, batch: Batch) -> Tensor:
        self.check_output("values")
        shards = self._shards(batch)
        return in_token_order(batch, shards, self._each("values", shards)).double()

    def step(
        self,
        batch: Batch,
        coefficients: LossCoefficients,
        *,
        lr: float,
        critic: ValueTerms | None = None,
        entropy_weights: Tensor | None = None,
    ) -> StepReport:
        """See `Learner.step`; then updates the copy. memory/*peak_mb is the maximum over the
        workers; further metrics are throughput/tflops and throughput/mfu, means over the workers.

        Raises TrainingError, and stops the workers, when one fails or does not answer in time."""
        if critic is not None:
            self.check_output("values")
        if entropy_weights is not None:
            raise PolicyError("the verl learner gives no gradient of the entropy")
        if not batch.n_tokens:
            return StepReport(logprobs=torch.empty(0))
        if len(batch.row_unit):  # a unit may be on several ranks
            coefficients = partial(
                fixed_coefficients, coefficients(self.logprobs(batch), torch.arange(batch.n_tokens))
            )
        shards = self._shards(batch)
        sent_coefficients, sent_terms = self.workers.sent(coefficients), self.workers.sent(critic)
        reports = self._each("step", shards, sent_coefficients, lr, sent_terms)
        if reports[0].applied:
            self._follow()
        logprobs_N, entropy_N = (
            in_token_order(batch, shards, [report.policy.columns[name] for report in reports])
            for name in ("log_probs", "entropy")
        )
        metrics = _metrics([report.metrics for report in reports])
        if critic is not None:
            parts = [report.critic for report in reports]
            loss, clipped = sum(part.loss for part in parts), sum(part.clipped for part in parts)
            metrics |= critic_metrics(critic, loss, clipped, parts[0].grad_norm)
        return StepReport(
            loss=sum(report.policy.loss for report in reports),
            grad_norm=reports[0].policy.grad_norm,
            logprobs=logprobs_N,
            entropy=entropy_N,
            tokens=sum(sum(shard.lengths) for shard in shards),
            applied=reports[0].applied,
            metrics=metrics,
        )

    def mark(self) -> None:
        self.workers.all("mark")

    def shrink(self, share: float) -> None:
        self.workers.all("shrink", share)
        self._follow()

    def save(self, directory: Path) -> None:
        """Write a resumable checkpoint, as `TorchLearner.save` does."""
        self.save_policy(directory)
        if self.strategy != FSDP2:
            self.workers.all("save", str((directory / ENGINE).absolute()))
            return
        self._save_optimizer("current", self.parameters(), directory)
        if self.critic is not None:
            parameters, file = dict(self.critic.named_parameters()), directory / CRITIC
            file.parent.mkdir(exist_ok=True)
            self._save_weights("values", parameters, file)
            self._save_optimizer("values", parameters, file.parent)
        if self._follows():
            parameters = dict(self.model.named_parameters())
            self._save_weights("reference", parameters, directory / REFERENCE)

    def load(self, directory: Path) -> None:
        if self.strategy != FSDP2:
            self._load_engine(directory)
            return
        state = read_state(directory, self.parameters(), "adamw")
        parts = [("current", self.read_policy(directory), state)]
        if self.critic is not None:
            parameters, file = dict(self.critic.named_parameters()), directory / CRITIC
            state = read_state(file.parent, parameters, "adamw")
            parts.append(("values", read_weights(self.critic, file), state))
        if self._follows():
            parts.append(("reference", read_weights(self.model, directory / REFERENCE), {}))
        for part in parts:
            self._restore(*part)
        self._follow()

    def _load_engine(self, directory: Path) -> None:
        if not (directory / ENGINE).is_dir():
            raise PolicyError(
                f"checkpoint {directory}: it has no optimizer of verl's engine {self.strategy!r}; "
                "resume with the learner it was made with, or start a new run from these weights"
            )
        self.workers.all("load", str((directory / ENGINE).absolute()))
        self._follow()

    def close(self) -> None:
        """Stop the workers, and Ray if it was started here. May be called again."""
        self.workers.close()

    def _follows(self) -> bool:
        return "reference" in self.frozen and self.frozen["reference"].every > 0

    def _follow(self) -> None:
        """Copy the workers' weights into this process's model."""
        weights = self.workers.all("weights", "current")[0]
        if self.adapters is None:
            copy_weights(self.model, weights)
        else:
            self.adapters.restore(self.policy, weights)

    def _save_weights(self, of: str, parameters: Mapping[str, Tensor], file: Path) -> None:
        weights = self.workers.all("weights", of)[0]
        save_file(
            {name: weights[name].to(p.dtype).contiguous() for name, p in parameters.items()}, file
        )

    def _save_optimizer(self, of: str, parameters: Mapping[str, Tensor], directory: Path) -> None:
        moments = self.workers.all("moments", of)[0]
        tensors = {
            key: value for key, value in moments.items() if key.rpartition("/")[0] in parameters
        }
        narrow = [name for name, parameter in parameters.items() if parameter.dtype in NARROW]
        weights = self.workers.all("weights", of)[0] if narrow else {}
        tensors |= {f"{name}/{MASTER}": weights[name] for name in narrow}
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        save_state(tensors, parameters, "adamw", directory)

    def _restore(self, of: str, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Send weights (the master weights if there are any) and moments to the workers."""
        moments = {key: value for key, value in state.items() if not key.endswith(f"/{MASTER}")}
        masters = {
            key.rpartition("/")[0]: value for key, value in state.items() if key not in moments
        }
        weights_by_name = {**weights, **masters}
        if of in ("current", "reference") and self.adapters is None:
            # Tied weights are one parameter with two names; master weights and the reference's file
            # contain only the first.
            first = {p.data_ptr(): name for name, p in self.model.named_parameters()}
            tied_names = {n: first.get(p.data_ptr(), n) for n, p in self.model.state_dict().items()}
            weights_by_name = {
                name: weights_by_name[source]
                for name, source in tied_names.items()
                if source in weights_by_name
            }
        full = {name: tensor.detach().float() for name, tensor in weights_by_name.items()}
        empty: list[dict[str, Tensor]] = [{}] * (self.workers.ranks - 1)
        ranks = self.workers.ranks
        self.workers.each(
            "restore", [of] * ranks, [full, *empty], [moments, *empty], [bool(moments)] * ranks
        )

    def _each(self, verb: str, shards: Sequence[Any], *shared: Any) -> list[Any]:
        """Call a method on every rank with its shard; returns one result per shard."""
        spread = [shards[number] for number, _ in self.layout]
        same = ([value] * len(spread) for value in shared)
        answers = zip(self.layout, self.workers.each(verb, spread, *same), strict=True)
        by_shard = {
            number: answer for (number, answers_for_it), answer in answers if answers_for_it
        }
        return [by_shard[number] for number in range(len(shards))]

    def _shards(self, batch: Batch) -> list[Shard]:
        return shards_of(batch, 1 + max(number for number, _ in self.layout), self.token_budget)


def _critic_shapes(critic: Mapping[str, Any], dtype: torch.dtype) -> ModuleDict | None:
    """The modules of `ValueModel.modules` on the meta device, for names and shapes."""
    if not critic:
        return None
    config = AutoConfig.from_pretrained(critic["model"]["path"])
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(config, dtype=dtype).base_model
        head = Linear(config.get_text_config().hidden_size, 1)
    return ModuleDict({"head": head, "decoder": decoder})


def _metrics(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Aggregate metrics over ranks: maximum of a peak, mean of others."""
    return {
        name: max(values) if "peak" in name else sum(values) / len(values)
        for name in ranks[0]
        if (values := [rank[name] for rank in ranks if name in rank])
    }


def verl_learner(
    config: RunConfig,
    algo: Algo,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    adapters: Adapters | None,
    name: str,
) -> VerlLearner:
    """The learner of `model` or its adapter `name`. Raises ConfigError for settings that verl does
    not support and without a supported verl, PolicyError for an auxiliary model of another
    vocabulary and for models that the workers cannot load."""
    frozen, critic = frozen_sources(config, algo, model.name_or_path), config.critic.model
    sources = dict(frozen.values())
    if critic and critic != "copy":
        sources["critic.model"] = config.model_source(critic)
    for key, source in sources.items():
        _check_vocabulary(key, source, tokenizer)
    return VerlLearner(
        model,
        tokenizer,
        settings(config, model.name_or_path),
        adapters=adapters,
        policy=name,
        frozen={stream: source for stream, (_, source) in frozen.items()},
        every=config.reference.every,
    )


def _check_vocabulary(key: str, name: str, tokenizer: Tokenizer) -> None:
    """Raise PolicyError unless the model `name` has the policy's vocabulary."""
    try:
        its_tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{key} = {name!r}: cannot be loaded: {one_line(str(error))}") from None
    check_vocabulary(key, name, its_tokenizer, tokenizer)
