"""The batches of failed optimizer steps, in files.

A file is safetensors with the tensors of the batch and its terms and the policy's log-probs; other
values are JSON in its metadata. `load_dump` reads it without the model or the store.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.diagnostics.bad_steps import Dump
from agentrl.algorithms.objective.core import Terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.base.files import share_weights
from agentrl.errors import TrainingError

OLD_NAMES = {  # of log-probs, in files of earlier versions
    "o": "old", "b": "sampler", "q": "reference", "t": "teacher", "o_K": "old_candidates",
    "t_K": "teacher_candidates", "share": "weight_of_current",
    "current_in_old": "weight_of_current",
}  # fmt: skip
ROW = [field.name for field in dataclasses.fields(TokenRow)]


def keep_in(folder: Path, name: str, dump: Dump) -> str:
    """Write the batch of a step into a folder; returns a sentence that says where it is."""
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
    batch = Batch(rows=rows, rewards=table("reward"), remembered=table("memory"), **columns)
    written = table("stream") | table("logprobs")
    known = {OLD_NAMES.get(name, name): column for name, column in written.items()}
    sampler, given = known.pop("sampler"), GivenLogProbs(**known)
    credit = tensors["advantage"], tensors["weight"]
    terms = Terms(*credit, sampler, given, table("ids"), skip=None)
    return Dump(batch, terms, tensors["logprobs"], loss, grad_norm)
