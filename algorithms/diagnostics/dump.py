"""Failed optimizer steps: writes their batches to files, and ends the run after too many.

A file is safetensors with the tensors of the batch and its terms and the policy's log-probs; other
values are JSON in its metadata. `load_dump` reads it without the model or the store.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.objective.core import Terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.errors import TrainingError

OLD_NAMES = {  # of log-probs, in files of earlier versions
    "o": "old", "b": "sampler", "q": "reference", "t": "teacher", "share": "current_in_old",
    "o_K": "old_candidates", "t_K": "teacher_candidates",
}  # fmt: skip
ROW = [field.name for field in dataclasses.fields(TokenRow)]


@dataclass(frozen=True, slots=True)
class Dump:
    """All inputs of psi and the loss of one optimizer step, except the weights."""

    batch: Batch
    terms: Terms
    logprobs: Tensor  # float32 [N], of the policy; NaN also if it was not computed
    loss: float
    grad_norm: float


@dataclass(slots=True)
class BadSteps:
    """Counts consecutive optimizer steps that changed no weight; a restart begins at 0."""

    folder: Path  # for the files
    limit: int
    streak: int = 0

    def bad(self, step: int, number: int, dump: Dump) -> None:
        """Write optimizer step `number` of a training step to a file and warn. Raises TrainingError
        after `limit` in a row."""
        self.streak += 1
        path = self.folder / f"{step:06d}.{number}.safetensors"
        unknown = int((~dump.logprobs.isfinite()).sum())
        what = (
            f"step {step}: {unknown} of {dump.logprobs.numel()} log-probs of the policy are not "
            f"finite, the loss is {dump.loss:.3g}, the gradient norm {dump.grad_norm:.3g}"
        )
        where = f"its batch is in {path}"
        try:
            save_dump(path, dump)
        except (OSError, SafetensorError) as error:
            where = f"its batch could not be written to {path} ({error})"
        if self.streak >= self.limit:
            raise TrainingError(
                f"{what}, for the {self.streak}. optimizer step in a row; {where}. Continue from "
                "the last checkpoint with a smaller algorithm.lr or policy.dtype = 'float32'"
            )
        warnings.warn(f"{what}; it is skipped, and {where}", RuntimeWarning, stacklevel=3)


def save_dump(path: Path, dump: Dump) -> None:
    """Write one file, and its folder. The batch must have rows. Raises OSError."""
    batch, terms = dump.batch, dump.terms
    flat = {f"row/{name}": torch.cat([getattr(row, name) for row in batch.rows]) for name in ROW}
    flat["row/length"] = torch.tensor([len(row.tokens) for row in batch.rows], dtype=torch.int64)
    flat |= {"logprobs": dump.logprobs, "advantage": terms.advantage, "weight": terms.weight}
    for prefix, columns in (
        ("reward", batch.rewards), ("memory", batch.memory),
        ("logprobs", {"sampler": terms.sampler, **terms.given.computed()}), ("ids", terms.ids),
    ):  # fmt: skip
        flat |= {f"{prefix}/{name}": column for name, column in columns.items()}
    plain: dict[str, Any] = {"loss": repr(dump.loss), "grad_norm": repr(dump.grad_norm)}
    others = {field.name for field in dataclasses.fields(batch)} - {"rows", "rewards", "memory"}
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


def load_dump(path: Path) -> Dump:
    """Read a file of `save_dump`. Raises TrainingError for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads(file.metadata()["dump"])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise TrainingError(f"{path}: it is no dump of an optimizer step ({error})") from None
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
    parts = [torch.split(flat[name], lengths if name == "tokens" else actions) for name in ROW]
    rows = [TokenRow(*row) for row in zip(*parts, strict=True)]
    batch = Batch(rows=rows, rewards=table("reward"), memory=table("memory"), **columns)
    letters = {OLD_NAMES[letter]: column for letter, column in table("stream").items()}
    known = letters | table("logprobs")
    sampler, given = known.pop("sampler"), GivenLogProbs(**known)
    credit = tensors["advantage"], tensors["weight"]
    terms = Terms(*credit, sampler, given, table("ids"), skip=None)
    return Dump(batch, terms, tensors["logprobs"], loss, grad_norm)
