"""The language-model head on action positions: log-probs without a [T, V] tensor of logits.

Invariant: at most two tensors of a chunk's elements exist at a time, forward or backward, for any
batch. The backward pass recomputes the logits of a block of the vocabulary from the saved hidden
states and log-normaliser and computes the gradients of hidden states and weight directly; a frozen
weight (LoRA, a shared base) costs nothing. Cut Cross-Entropy, arXiv 2411.09009, does the same in
one kernel.

`ThreadTuner` selects the number of torch threads for small models: one or all, whichever is
measured to be faster. Threads synchronise after every operation. On cores shared with other
programs one thread is often not running, so a step of a small model takes several times as long
with all threads as with one; on idle cores all threads are faster. Invariant: the number is one or
a power of two, which give bitwise equal results with `MKL_CBWR=AUTO,STRICT`; without that setting
it is the caller's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import Linear, Module
from torch.utils.checkpoint import checkpoint

from agentrl.algorithms.model.products import linear, mm

log = logging.getLogger("agentrl.algorithm")


MIN_LOGPROB = -100.0  # nats, the smallest log-prob that `other_logprobs` returns
# Elements of one chunk of logits, 32 MiB in float32. On a CPU larger chunks are slower because they
# # miss the cache, and smaller ones because their products are narrow. On a GPU a chunk has
# GPU_CHUNKS times as many.
MAX_LOGITS = 2**23
GPU_CHUNKS = 8
# Blocks have a multiple of so many columns, because GPU kernels for odd widths are slower.
ALIGNED = 128


def action_logprobs(
    head: Module,
    hidden_NH: Tensor,
    tokens_N: Tensor,
    temperature_N: Tensor,
    *,
    fp32: bool = False,
    learn_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature)[token], and the entropy of that distribution in nats;
    both [N], float32 (float64 for float64 inputs).

    The log-probs are differentiable in hidden states and head, the entropy only if `learn_entropy`.
    fp32: multiply bfloat16 hidden states and head in float32, which brings learner and sampler
    closer. ScaleRL, arXiv 2510.13786."""
    if type(head) is Linear:
        arguments = (
            hidden_NH,
            head.weight,
            head.bias,
            tokens_N,
            temperature_N,
            fp32,
            learn_entropy,
        )
        logprobs_N, entropy_N = _Head.apply(*arguments)  # type: ignore[no-untyped-call]
        return logprobs_N, entropy_N
    # A wrapped head (an adapter) must be called to get its logits.
    chunk = max(1, MAX_LOGITS // _vocabulary(head))
    parts = _chunks(chunk, hidden_NH, tokens_N, temperature_N)
    scored = [
        checkpoint(_call, head, *inputs, fp32, learn_entropy, use_reentrant=False)
        for inputs in parts
    ]
    logprobs, entropies = zip(*scored, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


@torch.no_grad()
def top_tokens(
    head: Module, hidden_NH: Tensor, tokens_N: Tensor, k: int, *, fp32: bool = False
) -> Tensor:
    """The given token and the k - 1 most probable others, int64 [N, min(k, vocabulary size)]."""
    chunk, top = max(1, MAX_LOGITS // _vocabulary(head)), []
    for hidden_CH, tokens_C in _chunks(chunk, hidden_NH, tokens_N):
        logits_CV = _called(head, hidden_CH, fp32).scatter(1, tokens_C[:, None], torch.inf)
        top.append(logits_CV.topk(min(k, logits_CV.shape[1])).indices)
    return torch.cat(top)


def other_logprobs(
    head: Module,
    hidden_NH: Tensor,
    ids_NK: Tensor,
    logprobs_N: Tensor,
    temperature_N: Tensor,
    *,
    fp32: bool = False,
) -> Tensor:
    """Log-probs [N, K] of the tokens `ids_NK`, computed from that of the first one; at least
    MIN_LOGPROB.

    They are computed from differences of logits, so a plain head computes only these K logits. With
    gradients, the graph keeps K rows of the head's weight per position."""
    plain = type(head) is Linear  # not a wrapper of a linear layer
    width = ids_NK.shape[1] * hidden_NH.shape[1] if plain else _vocabulary(head)
    logits = []
    for hidden_CH, ids_CK in _chunks(max(1, MAX_LOGITS // width), hidden_NH, ids_NK):
        if isinstance(head, Linear) and plain:
            logits.append(_some_logits(head, hidden_CH, ids_CK, fp32))
        else:
            logits.append(_called(head, hidden_CH, fp32).gather(1, ids_CK))
    logits_NK = _divided(torch.cat(logits), temperature_N)
    others_NK = logits_NK - logits_NK[:, :1] + logprobs_N.to(logits_NK)[:, None]
    return others_NK.clamp(min=MIN_LOGPROB)


def _some_logits(head: Linear, hidden_CH: Tensor, ids_CK: Tensor, fp32: bool) -> Tensor:
    """Logits [C, K], in the dtype in which the head computes all logits, for equal rounding."""
    bias = None if head.bias is None else head.bias[ids_CK]
    weight_CKH, bias_CK = _operands(head.weight[ids_CK], bias, fp32)
    hidden_CH1 = hidden_CH.to(weight_CKH.dtype)[:, :, None]
    if bias_CK is None:
        return (weight_CKH @ hidden_CH1)[:, :, 0]
    return torch.baddbmm(bias_CK[:, :, None], weight_CKH, hidden_CH1)[:, :, 0]


class _Head(torch.autograd.Function):
    """`action_logprobs` of a plain linear head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        tokens_N: Tensor,
        temperature_N: Tensor,
        fp32: bool,
        learn_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        most = MAX_LOGITS * (GPU_CHUNKS if weight_VH.is_cuda else 1)
        chunk = max(1, most // len(weight_VH))
        ctx.most, ctx.fp32 = most, fp32
        ctx.set_materialize_grads(False)
        weight, bias = _operands(weight_VH, bias_V, fp32)
        scored = _fused(_scored) if weight.is_cuda else _scored
        scores = [
            scored(linear(hidden_CH.to(weight.dtype), weight, bias), temperature_C, tokens_C)
            for hidden_CH, tokens_C, temperature_C in _chunks(
                chunk, hidden_NH, tokens_N, temperature_N
            )
        ]
        logprobs_N, entropy_N, normaliser_N = map(torch.cat, zip(*scores, strict=True))
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, tokens_N, temperature_N, normaliser_N, entropy_N
        )
        if not learn_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_N: Tensor | None, pull_N: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        if grad_N is None and pull_N is None:
            return None, None, None, None, None, None, None
        hidden_NH, weight_VH, bias_V, tokens_N, temperature_N, normaliser_N, entropy_N = (
            ctx.saved_tensors
        )
        temperature_N = temperature_N.to(normaliser_N)
        grad_N = torch.zeros_like(normaliser_N) if grad_N is None else grad_N
        scale_N1 = (grad_N / temperature_N)[:, None]
        pull_N1 = None if pull_N is None else (pull_N / temperature_N)[:, None]
        weight, bias = _operands(weight_VH, bias_V, ctx.fp32)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_weight = torch.empty_like(weight_VH) if wants_weight else None
        grad_bias = torch.empty_like(bias_V) if wants_bias else None
        narrow_NH = hidden_NH.to(weight.dtype)
        gradient = _fused(_gradient) if weight.is_cuda else _gradient
        # Hidden states' gradients are summed over blocks of the vocabulary. The weight's gradient
        # needs no sum, which would be as large as the weight, in a wider dtype.
        grad_hidden = torch.zeros_like(hidden_NH, dtype=normaliser_N.dtype)
        width = max(1, ctx.most // max(len(tokens_N), 1))
        width -= width % ALIGNED if width > ALIGNED else 0
        for first in range(0, len(weight_VH), width):
            part = slice(first, first + width)
            logits_NC = linear(narrow_NH, weight[part], None if bias is None else bias[part])
            row_values = temperature_N, normaliser_N, entropy_N, scale_N1, pull_N1
            narrow_NC = gradient(logits_NC, tokens_N - first, *row_values)
            if wants_hidden:
                grad_hidden += mm(narrow_NC, weight[part])
            if grad_weight is not None:
                grad_weight[part] = mm(narrow_NC.T, narrow_NH)
            if grad_bias is not None:
                grad_bias[part] = narrow_NC.sum(0, dtype=grad_hidden.dtype)
        grad_hidden_NH = grad_hidden.to(hidden_NH.dtype) if wants_hidden else None
        return grad_hidden_NH, grad_weight, grad_bias, None, None, None, None


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled to few kernels, which read and write each logit once or twice."""
    return torch.compile(function, dynamic=True)


def _scored(
    logits_CV: Tensor, temperature_C: Tensor, tokens_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _score(_divided(logits_CV, temperature_C), tokens_C)


def _gradient(
    logits_NC: Tensor,
    at_N: Tensor,
    temperature_N: Tensor,
    normaliser_N: Tensor,
    entropy_N: Tensor,
    scale_N1: Tensor,
    pull_N1: Tensor | None,
) -> Tensor:
    """Gradient of a block of logits, in their dtype. at_N: columns of the tokens; some are outside
    of the block."""
    logp_NC = _divided(logits_NC, temperature_N).sub_(normaliser_N[:, None])
    grad_NC = _pulled(logp_NC, scale_N1, pull_N1, entropy_N[:, None])
    add = add_at_columns if grad_NC.is_cuda else scatter_columns
    return add(grad_NC, at_N[:, None], scale_N1).to(logits_NC.dtype)


def add_at_columns(grad_NC: Tensor, at_N1: Tensor, scale_N1: Tensor) -> Tensor:
    """Add each row's scale at its column, if that is in the block. Unlike a scatter, it can be
    fused with the operations around it."""
    columns_C = torch.arange(grad_NC.shape[1], device=grad_NC.device)
    return grad_NC + scale_N1 * (columns_C == at_N1)


def scatter_columns(grad_NC: Tensor, at_N1: Tensor, scale_N1: Tensor) -> Tensor:
    """`add_at_columns` in place, which takes negligible time on a CPU."""
    inside = at_N1.clamp(0, grad_NC.shape[1] - 1)
    return grad_NC.scatter_add_(1, inside, scale_N1 * (inside == at_N1))


def _pulled(
    logp_NC: Tensor, scale_N1: Tensor, pull_N1: Tensor | None, entropy_N1: Tensor
) -> Tensor:
    """Gradient of the logits, without the one-hot part of the log-probs' gradient; in place."""
    # d log softmax(z)[token] / d z = one-hot(token) - softmax(z)
    if pull_N1 is None:
        return logp_NC.exp_().mul_(-scale_N1)
    # d entropy / d z = - softmax(z) * (log softmax(z) + entropy)
    p_NC = logp_NC.exp()
    return logp_NC.add_(entropy_N1).mul_(-pull_N1).sub_(scale_N1).mul_(p_NC)


def _chunks(size: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(column, size) for column in columns), strict=True)


def _operands(weight: Tensor, bias: Tensor | None, fp32: bool) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the dtype of the multiplication, converted once for all chunks."""
    if not fp32 or weight.dtype == torch.float64:
        return weight, bias
    return weight.float(), None if bias is None else bias.float()


def _divided(logits_CV: Tensor, temperature_C: Tensor) -> Tensor:
    wide = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    # In place: no backward pass needs the undivided logits.
    return wide.div_(temperature_C.to(wide.dtype)[:, None])


def _score(logits_CV: Tensor, tokens_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of each token, entropy and log-normaliser [C], with one exponential per logit."""
    peak_C1 = logits_CV.amax(-1, keepdim=True)
    exp_CV = (logits_CV - peak_C1).exp_()
    total_C = exp_CV.sum(-1)
    normaliser_C = total_C.log() + peak_C1[:, 0]
    logprobs_C = logits_CV.gather(1, tokens_C[:, None])[:, 0] - normaliser_C
    # In place, to avoid a third tensor of this size for sum(exp * logit).
    entropy_C = normaliser_C - exp_CV.mul_(logits_CV).sum(-1) / total_C
    return logprobs_C, entropy_C, normaliser_C


def _call(
    head: Module,
    hidden_CH: Tensor,
    tokens_C: Tensor,
    temperature_C: Tensor,
    fp32: bool,
    learn_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """`action_logprobs` of one chunk by calling the head."""
    logprobs_CV = _divided(_called(head, hidden_CH, fp32), temperature_C).log_softmax(-1)
    source = logprobs_CV if learn_entropy else logprobs_CV.detach()
    entropy_C = -(source.exp() * source).sum(-1)
    return logprobs_CV.gather(1, tokens_C[:, None])[:, 0], entropy_C


def _called(head: Module, hidden_CH: Tensor, fp32: bool) -> Tensor:
    """The head's logits [C, V]."""
    if fp32 and hidden_CH.dtype != torch.float64:
        wide = {name: parameter.float() for name, parameter in head.named_parameters()}
        logits_CV: Tensor = functional_call(head, wide, hidden_CH.float())
    else:
        logits_CV = head(hidden_CH)
    return logits_CV


def _vocabulary(head: Module) -> int:
    """Number of logits: the rows of the largest parameter, also for a wrapped head."""
    return max(parameter.shape[0] for parameter in head.parameters())


SMALL_MODEL = 5_000_000  # parameters; synchronisation is negligible in larger models
MAX_SAMPLING = 8  # threads that a decoding step can use, because its products are small
CALLS_BETWEEN_TRIALS = 150  # calls between trials
PAIRS_PER_TRIAL = 3  # pairs of calls per trial: one thread, all threads
MUCH_SLOWER = 2.0  # time ratio all / one above which a trial ends after its first pair
WORTHWHILE_RATIO = 0.9  # time ratio below which all threads are used: other programs need cores too


@dataclass(slots=True)
class ThreadTuner:
    """Chooses the number of threads for repeated work. count: the current choice. most: the number
    of threads that is compared with one; 1: no trials. name: a name of the work for the log."""

    count: int
    most: int = 1
    name: str = ""
    clock: Callable[[], float] = time.perf_counter
    _until: int = 1  # calls before the next trial; the first call warms up
    _times: list[float] = field(default_factory=list)  # per unit of work: one, all, one, all ...
    _logged: int = 0

    def computing(self) -> AbstractContextManager[None]:
        """Compute with the current choice."""
        return computing_with(self.count)

    @contextmanager
    def working(self, amount: float = 1.0) -> Iterator[None]:
        """Compute with the current choice, or in a trial alternately with one and all threads, and
        measure the time per `amount` of work."""
        trying = self.most > 1 and self._until <= 0
        started = self.clock()
        with computing_with((1, self.most)[len(self._times) % 2] if trying else self.count):
            yield
        if trying:
            self._note((self.clock() - started) / max(amount, 1.0))
        else:
            self._until -= 1

    def _note(self, seconds: float) -> None:
        self._times.append(seconds)
        if len(self._times) % 2:
            return
        ratio = sum(self._times[1::2]) / sum(self._times[::2])
        if len(self._times) == 2 * PAIRS_PER_TRIAL or ratio > MUCH_SLOWER:
            self._times, self._until = [], CALLS_BETWEEN_TRIALS
            self.count = self.most if ratio < WORTHWHILE_RATIO else 1
            if self._logged != self.count:
                self._logged = self.count
                chosen = "1 thread" if self.count == 1 else f"{self.count} threads"
                slower = f"{self.most} take {ratio:.1f} times as long as 1"
                log.info("%s with %s: %s", self.name, chosen, slower)


def thread_tuner(parameters: int, name: str, otherwise: int) -> ThreadTuner:
    """A tuner for the work of a model. Without trials, always `otherwise` threads, for a large
    model and if results would depend on the number of threads."""
    most = largest_power_of_two(os.cpu_count() or 1)
    # See `agentrl.core.processes.environment`.
    strict = os.environ.get("MKL_CBWR", "").endswith("STRICT")
    if parameters > SMALL_MODEL or not strict or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return ThreadTuner(otherwise)
    return ThreadTuner(most, most, name)


def sampling_threads(parameters: int) -> int:
    """The number of threads that sample from a model, if no number is set."""
    if parameters <= SMALL_MODEL:
        return 1
    return largest_power_of_two(min(os.cpu_count() or 1, MAX_SAMPLING))


def largest_power_of_two(most: int) -> int:
    return 1 << (max(1, most).bit_length() - 1)


@contextmanager
def computing_with(number: int) -> Iterator[None]:
    """Set the number of torch threads of the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
