"""Records of a step: the credit of each call, in the store, and the batches of failed optimizer
steps, in files.

A file is safetensors with the tensors of the batch and its terms and the policy's log-probs; other
values are JSON in its metadata. `load_dump` reads it without the model or the store.

Recorded gates are those of a token's first optimizer step; in later steps the policy differs from
the sampler by design. Values are float32; one that is equal for all tokens of a call is stored
once.
"""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.algorithms.credit.core import (
    CriticValues,
    GroupRelative,
    TokenKLPenalty,
    nested_records,
)
from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.data.ids import owner, reduce_by, units
from agentrl.algorithms.data.state import RememberedColumn
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.core import Algo, Terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.train.metrics import Dump
from agentrl.core.errors import TrainingError
from agentrl.core.files import share_weights
from agentrl.core.types import POLICY, Credit

OLD_NAMES = {  # names of log-probs in files of earlier versions
    "o": "old", "b": "sampler", "q": "reference", "t": "teacher", "o_K": "old_candidates",
    "t_K": "teacher_candidates", "share": "weight_of_current",
    "current_in_old": "weight_of_current",
}  # fmt: skip
ROW = [field.name for field in dataclasses.fields(TokenRow)]


def keep_in(folder: Path, name: str, dump: Dump) -> str:
    """Write the batch of a step into a folder; returns a sentence with its path."""
    path = folder / f"{name}.safetensors"
    try:
        save_dump(path, dump)
    except (OSError, SafetensorError) as error:
        return f"its batch could not be written to {path} ({error})"
    return f"its batch is in {path}"


def save_dump(path: Path, dump: Dump) -> None:
    """Write one file, and its folder. The batch must have rows. Raises OSError."""
    batch, terms = dump.batch, dump.terms
    flat = {f"row/{name}": torch.cat([getattr(row, name) for row in batch.rows]) for name in ROW}
    flat["row/length"] = torch.tensor([len(row.tokens) for row in batch.rows], dtype=torch.int64)
    flat |= {"logprobs": dump.logprobs, "advantage": terms.advantage, "weight": terms.weight}
    for prefix, columns in (
        ("reward", batch.rewards), ("memory", batch.remembered),
        ("logprobs", {"sampler": terms.sampler, **terms.given.computed()}), ("ids", terms.ids),
    ):  # fmt: skip
        flat |= {f"{prefix}/{name}": column for name, column in columns.items()}
    plain: dict[str, Any] = {"loss": repr(dump.loss), "grad_norm": repr(dump.grad_norm)}
    others = {field.name for field in dataclasses.fields(batch)} - {"rows", "rewards", "remembered"}
    for name in sorted(others):
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            flat[f"batch/{name}"] = value
        else:
            plain[name] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors cannot store views, so every tensor gets memory of its own.
    owned = {name: tensor.detach().cpu().clone() for name, tensor in flat.items()}
    save_file(owned, path, metadata={"dump": json.dumps(plain)})
    share_weights(path)


def load_dump(path: Path) -> Dump:
    """Read a file of `save_dump`. Raises TrainingError for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads(file.metadata()["dump"])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise TrainingError(f"{path}: it is not a dump of an optimizer step ({error})") from None
    loss, grad_norm = float(plain.pop("loss")), float(plain.pop("grad_norm"))

    def table(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(f"{prefix}/"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{prefix}/")
        }

    columns, flat = plain | table("batch"), table("row")
    lengths = flat["length"].tolist()
    actions = columns["token_row"].bincount(minlength=len(lengths)).tolist()
    observed = columns["observation_row"].bincount(minlength=len(lengths)).tolist()
    sizes = {"tokens": lengths, "observed": observed}
    columns_by_row = [torch.split(flat[name], sizes.get(name, actions)) for name in ROW]
    rows = [TokenRow(*row) for row in zip(*columns_by_row, strict=True)]
    batch = Batch(rows=rows, rewards=table("reward"), remembered=table("memory"), **columns)
    written = table("stream") | table("logprobs")
    logprobs = {OLD_NAMES.get(name, name): column for name, column in written.items()}
    sampler, given_logprobs = logprobs.pop("sampler"), GivenLogProbs(**logprobs)
    credit = tensors["advantage"], tensors["weight"]
    terms = Terms(*credit, sampler, given_logprobs, table("ids"), skip=None)
    return Dump(batch, terms, tensors["logprobs"], loss, grad_norm)


COLUMNS = ("advantage", "gate", "weight", "psi")


@dataclass(slots=True)
class CreditRecorder:
    """Records the credit of one step, by call."""

    policy: str = POLICY
    baselines: dict[str, array[float]] = field(default_factory=dict)
    credits: dict[str, Credit] = field(default_factory=dict)

    def open(self, algo: Algo, batch: Batch) -> None:
        """Begin a step. batch: the whole batch, from which baselines are computed."""
        values = call_values(batch, baselines(algo, batch))
        self.baselines = dict(zip(call_ids(batch), values, strict=True))
        self.credits = {}

    def record(self, algo: Algo, part: Batch, terms: Terms, logprobs: Tensor) -> None:
        """Record an optimizer step on the batch or a part of it. logprobs: log-probs of the policy
        before the step: of the sampled tokens [N], or of `Batch.topk_tokens` [N, K]."""
        calls = call_ids(part)
        if all(call in self.credits for call in calls):
            return  # only the first epoch is recorded
        psi = objective.loss_coefficients(
            algo, terms, logprobs.double(), torch.arange(part.n_tokens)
        )
        columns = (
            torch.where(terms.weight > 0, terms.advantage, torch.nan),
            gate_product(algo, terms, logprobs),
            terms.weight,
            psi if psi.dim() == 1 else psi[:, 0],  # for the sampled token
        )
        numbers = zip(calls, *(call_values(part, [x]) for x in columns), strict=True)
        for call, advantage, gate, weight, psi_values in numbers:
            if call not in self.credits:
                self.credits[call] = Credit(
                    transition=call,
                    policy=self.policy,
                    advantage=advantage,
                    baseline=self.baselines[call],
                    gate=gate,
                    weight=weight,
                    psi=psi_values,
                )

    def stored(self) -> list[Credit]:
        """The recorded credit, for the commit of the step."""
        return list(self.credits.values())


def gate_product(algo: Algo, terms: Terms, p: Tensor) -> Tensor:
    """The product c of all gates, float64 [N]. p: log-probs of the whole step, [N] or [N, K]."""
    now, index = p.detach().double().cpu(), torch.arange(len(p))
    gates = objective.gate_factors(algo, terms, objective.logprobs_at(terms, now, index), index)
    start = torch.ones(len(p), dtype=torch.float64)
    return math.prod((factor for _, _, factor in gates), start=start)


def call_ids(batch: Batch) -> list[str]:
    """Ids of the calls with tokens, in token order."""
    indices = torch.unique_consecutive(batch.token_transition).tolist()
    return [batch.transitions[call] for call in indices]


def with_baseline(algo: Algo) -> list[object]:
    """The parts of a credit that have a baseline, are a baseline, or are a KL penalty; the critic
    is listed once."""
    parts = list[object]()
    for part in nested_records(algo.credit):
        compared = isinstance(part, GroupRelative) and part.base != "none"
        critic = isinstance(part, CriticValues) and part not in parts
        if compared or critic or isinstance(part, RememberedColumn | TokenKLPenalty):
            parts.append(part)
    return parts


def baselines(algo: Algo, batch: Batch) -> list[Tensor]:
    """The baselines of group comparisons, remembered values, critic values and KL penalties,
    float64 [N] each, in the order of the credit's parts."""
    columns = []
    for part in with_baseline(algo):
        if isinstance(part, GroupRelative):
            columns.append(part.standard(batch)[1].baseline[owner(batch, part.level)])
        elif isinstance(part, CriticValues | TokenKLPenalty):
            columns.append(part(batch))
        elif isinstance(part, RememberedColumn):
            columns.append(part(batch)[owner(batch, part.level)])
    return columns


def call_values(batch: Batch, columns: Sequence[Tensor]) -> Iterator[array[float]]:
    """Yield the values of each call in token order, float32: the columns concatenated, each with
    one value per token, or with one value if all columns are constant over the call."""
    _, call, sizes = torch.unique_consecutive(
        batch.token_transition, return_inverse=True, return_counts=True
    )
    ends = sizes.cumsum(0)
    flat = [x.detach().cpu().float() for x in columns]
    changes = torch.zeros(sizes.numel(), dtype=torch.float64)
    for x in flat:
        differs = (x[1:] != x[:-1]) & ~(x[1:].isnan() & x[:-1].isnan())
        changes += reduce_by(differs & (call[1:] == call[:-1]), call[1:], sizes.numel())
    stops = torch.where(changes == 0, ends - sizes + 1, ends)
    arrays = [array("f", x.numpy().tobytes()) for x in flat]  # cheap to slice
    for first, stop in zip((ends - sizes).tolist(), stops.tolist(), strict=True):
        values = array("f")
        for column in arrays:
            values += column[first:stop]
        yield values


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored credit of a batch, float64 [N] per column; NaN = missing or not stored."""

    known: Tensor  # bool [N]: whether the step stored the token's call
    columns: dict[str, Tensor]
    compared: list[Tensor]  # see `baselines`


def read(algo: Algo, batch: Batch, credits: Mapping[str, Credit]) -> Stored:
    """Expand stored credit, by call, to the tokens of a batch. `compared` is NaN if the
    number of stored baselines is not that of the algorithm."""
    kinds = len(with_baseline(algo))
    n = batch.n_tokens
    stored = torch.zeros(n, dtype=torch.bool)
    columns = {name: torch.full((n,), torch.nan, dtype=torch.float64) for name in COLUMNS}
    compared = [torch.full((n,), torch.nan, dtype=torch.float64) for _ in range(kinds)]
    for call in torch.unique(batch.token_transition).tolist():
        credit = credits.get(batch.transitions[call])
        if credit is None:
            continue
        at = batch.token_transition == call
        stored |= at
        for name in COLUMNS:
            columns[name][at] = torch.tensor(getattr(credit, name), dtype=torch.float64)
        baseline = torch.tensor(credit.baseline, dtype=torch.float64)
        if kinds and baseline.numel() in (kinds, kinds * int(at.sum())):
            for x, values in zip(compared, baseline.view(kinds, -1), strict=True):
                x[at] = values
    return Stored(stored, columns, compared)


def replayed(algo: Algo, batch: Batch, stored: Stored) -> Batch:
    """The batch with the `remembered`, `values` and `reference` of the step, NaN at units without
    tokens. If the step stored nothing, the reference is the sampler."""
    remembered: dict[str, Tensor] = {}
    values, reference = batch.values, batch.sampler_logprobs.double()
    for part, x in zip(with_baseline(algo), stored.compared, strict=True):
        if isinstance(part, CriticValues):
            values = x
        elif isinstance(part, TokenKLPenalty) and stored.known.any():
            reference = batch.sampler_logprobs.double() - x / part.beta
        elif isinstance(part, RememberedColumn):
            at = owner(batch, part.level)
            size = units(batch, part.level, "all").numel()
            remembered[part.name] = torch.full((size,), torch.nan, dtype=x.dtype)
            remembered[part.name][at] = x
    return replace(batch, remembered=remembered, values=values, reference=reference)
