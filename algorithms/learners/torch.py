"""The reference learner: one process, one device, torch.

Owns the optimizer and, while `step` or `load` runs, the weights; between calls anybody may read
them. Always true: the gradient is a sum over micro-batches of whole rows with weights fixed
beforehand, so it does not depend on how rows are split; the model is in eval mode, since dropout
would make the sampler and the learner disagree; no graph and no gradient outlives a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel
from transformers.utils import logging

from agentrl.algorithms.batch import Batch
from agentrl.algorithms.learners.base import Psi, Scored, StepReport, ValueTerms
from agentrl.algorithms.model import Tokenizer, load_model
from agentrl.algorithms.packing import Packing, check_model, forward_logprobs, packs, usable
from agentrl.errors import PolicyError

OPTIMIZER = "optimizer.safetensors"  # tensors "<parameter>/<moment>"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class TorchLearner:
    """AdamW on one model, which the embedded policy server may share.

    packing: see `packing`. token_budget: tokens of one micro-batch. threads: what a call computes
    with, default what its thread already has. Raises PolicyError for a model it cannot train."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        packing: Packing = "trie",
        token_budget: int = 4096,
        threads: int | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        check_model(model)
        self.model = model.eval()
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()), betas=betas, weight_decay=weight_decay, fused=True
        )
        self.supplies: frozenset[Literal["o", "b", "q", "t", "v"]] = frozenset({"o", "b"})
        self.max_grad_norm = max_grad_norm
        self.packing = usable(model, packing)
        self.token_budget = token_budget
        self.threads = threads or torch.get_num_threads()
        self.tokenizer_files = _files_of(tokenizer)

    def logprobs(self, batch: Batch, of: Scored = "o") -> Tensor:
        """Log-probs of every action token at its sampling temperature, float32 [N], no graph."""
        if of != "o":
            raise PolicyError(f"the learner has no model for stream {of}")
        logprobs_N = torch.empty(batch.n_tokens)
        with _threads(self.threads), torch.no_grad():
            for pack in packs(batch, self.packing, self.token_budget):
                logprobs_N[pack.index] = forward_logprobs(self.model, pack).float().cpu()
        return logprobs_N

    def values(self, batch: Batch) -> Tensor:
        """The critic's value of the state before every action token, float64 [N], no graph."""
        raise PolicyError("the learner has no critic (stream v)")

    def step(
        self, batch: Batch, psi: Psi, *, lr: float, critic: ValueTerms | None = None
    ) -> StepReport:
        """One forward, backward and update on psi. A non-finite gradient changes nothing."""
        with _threads(self.threads):
            try:
                loss, logprobs_N, tokens = self._backward(batch, psi)
                norm = float(clip_grad_norm_(self.parameters.values(), self.max_grad_norm))
                applied = math.isfinite(norm) and batch.n_tokens > 0
                if applied:
                    for group in self.optimizer.param_groups:
                        group["lr"] = lr
                    self.optimizer.step()
            finally:
                self.optimizer.zero_grad(set_to_none=True)
        return StepReport(
            loss=loss,
            grad_norm=norm,
            logprobs=logprobs_N,
            tokens=tokens,
            applied=applied,
        )

    def save(self, directory: Path) -> None:
        """Write weights, tokenizer and optimizer into a directory: an ordinary Hugging Face one.

        Not atomic by itself; `checkpoint.save_checkpoint` makes it so."""
        directory.mkdir(parents=True, exist_ok=True)
        with _no_progress_bars():
            self.model.save_pretrained(directory)
        for name, content in self.tokenizer_files.items():
            (directory / name).write_bytes(content)
        save_file(self._moments(), directory / OPTIMIZER)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises PolicyError, with nothing changed, for a checkpoint of
        another model or a half-written one."""
        with _no_progress_bars():
            saved, _ = load_model(directory, device="cpu")
        weights, own = saved.state_dict(), self.model.state_dict()
        _check_shapes(directory, weights, own)
        moments = _read(directory / OPTIMIZER)
        names = list(self.parameters) if moments else []  # none before the first step
        _check_shapes(directory, moments, self._moment_shapes(names))
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
        state = {i: {m: moments[f"{n}/{m}"] for m in MOMENTS} for i, n in enumerate(names)}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _backward(self, batch: Batch, psi: Psi) -> tuple[float, Tensor, int]:
        """Accumulate the gradient; returns the loss, the log-probs [N] it was computed at and the
        number of tokens forwarded."""
        logprobs_N, loss, tokens = torch.empty(batch.n_tokens), 0.0, 0
        for pack in packs(batch, self.packing, self.token_budget):
            p = forward_logprobs(self.model, pack)
            current = p.detach().cpu()
            psi_n = psi(current, pack.index)
            torch.autograd.backward(p, -psi_n.to(p))
            loss -= float(psi_n.double() @ current.double())
            logprobs_N[pack.index] = current.float()
            tokens += len(pack.tokens)
        return loss, logprobs_N, tokens

    def _moments(self) -> dict[str, Tensor]:
        state = self.optimizer.state
        return {
            f"{name}/{moment}": state[parameter][moment]
            for name, parameter in self.parameters.items()
            if parameter in state
            for moment in MOMENTS
        }

    def _moment_shapes(self, names: list[str]) -> dict[str, Tensor]:
        scalar = torch.empty(())
        return {
            f"{name}/{moment}": scalar if moment == "step" else self.parameters[name]
            for name in names
            for moment in MOMENTS
        }


def _check_shapes(directory: Path, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name in sorted(saved.keys() | own.keys()):
        shapes = [str(list(of[name].shape)) if name in of else "none" for of in (saved, own)]
        if shapes[0] != shapes[1]:
            raise PolicyError(
                f"checkpoint {directory}: it is of another model ({name} is {shapes[0]} there, "
                f"{shapes[1]} in the policy); resume with the model it was made from"
            )


def _read(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise PolicyError(
            f"checkpoint {file.parent}: {file.name} is missing or incomplete ({error}); "
            "resume from another checkpoint"
        ) from None
    return tensors


def _files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What `save_pretrained` writes, made once: a tokenizer does not change while a run lasts."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Compute with so many threads in the calling thread; others keep theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws one per file, which would tear up the live view."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
