"""Forward passes over packs of rows: log-probs of action tokens only, differentiable.

There are three ways to compute a pack, from the fastest to the slowest. A way is correct for a
model if it gives the model's own log-probs; `prove` tests that before anything is trained:

- `packed`: the pack is one sequence, linear layers see every token once, and attention follows the
  branches (see `attention`); it replaces the model's own.
- `padded`: the model's own forward pass over right-padded batches of branches.
- `plain`: the model's own forward pass over one branch at a time.

Invariant: the result of a row does not depend on the other rows of its pack. Hidden states are
reduced to action positions before the language-model head (see `lm_head`).
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model import attention
from agentrl.algorithms.model.lm_head import action_logprobs, computing_with
from agentrl.algorithms.model.packing import Pack, Packing, pack_rows
from agentrl.algorithms.model.scaled import (
    ORIGINAL,
    VOCABULARY,
    ScalingError,
    attempt,
    copy_key,
    inputs_of,
    scaled_copy,
)
from agentrl.core.errors import PolicyError
from agentrl.core.processes import log_phase

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("agentrl.algorithm")

Way = Literal["packed", "padded", "plain"]
# Allowed difference from a model's own forward pass: of log-probs in nats, and of gradients
# relative to the largest one. A different order of sums causes less than a hundredth of it.
TOLERANCE = 5e-4
ROUNDING = 1e-5  # the same for gradients in padded batches, if rows can be computed alone
SHORT_FLOATS = 0.25  # nats: allowed difference of log-probs of a 16-bit model without a small copy
# Modules of transformers with Mamba-2 layers have a kernel for GPUs only. The fallback of some
# modules reads tokens after a chunk in releases before this version.
KERNEL, COMPUTES_CHUNKS = "mamba_chunk_scan_combined", "5.24"
ATTRIBUTE = "agentrl_proof"  # attribute of a model with its `Proof`


def hidden_states(model: PreTrainedModel, pack: Pack, way: Way | None = None) -> Tensor:
    """The last hidden state before each action, [n, H], on the model's device and differentiable in
    its weights.

    way: default: the fastest correct one, see `prove`. `packed` installs the attention function of
    `attention`, which without a pack is SDPA. Raises PolicyError for a row that is longer than the
    model's context, and for a model that cannot be computed."""
    limit, longest = attention.context_length(model), int(pack.positions.max()) + 1
    if limit and longest > limit:
        raise PolicyError(
            f"a row of {longest} tokens before its last action is longer than the context of model "
            f"type {model.config.model_type!r}, {limit} tokens: serve it with that context limit"
        )
    way = way or prove(model).way
    if way != "packed":
        return _hidden_by_branch(model, pack, alone=way == "plain")
    attention.install(model)
    if model.device.type == "cuda":
        pack = whole_blocks(pack)
    decoder, read = _inputs(model, pack)
    hidden_TH: Tensor = decoder(
        **read,
        attention_mask=attention.UNUSED,
        use_cache=False,
        plan=attention.TreePlan(pack.end, pack.positions),
    ).last_hidden_state[0]
    return hidden_TH[pack.states.to(model.device)]


def whole_blocks(pack: Pack) -> Pack:
    """Pad the pack with branches of one unused token each to whole blocks of a GPU's kernel: see
    `attention.kernel_options`."""
    size, block = len(pack.end), attention.FLEX_BLOCK
    new = torch.arange(size, -(-size // block) * block)
    unused = torch.zeros_like(new)
    return replace(
        pack,
        tokens=torch.cat((pack.tokens, unused)),
        positions=torch.cat((pack.positions, unused)),
        end=torch.cat((pack.end, new + 1)),
    )


def _inputs(model: PreTrainedModel, pack: Pack) -> tuple[Module, dict[str, Any]]:
    """The decoder of a model, and a pack's tokens and positions for it."""
    if inputs := inputs_of(model):
        return inputs.of_pack(pack)
    if int(pack.tokens.min()) < 0:
        raise PolicyError(
            f"model type {model.config.model_type!r} reads text alone, and the calls have images; "
            "choose a model that reads images, such as the policy's"
        )
    ids, places = (x[None].to(model.device) for x in (pack.tokens, pack.positions))
    return decoder_of(model), {"input_ids": ids, "position_ids": places}


def decoder_of(model: PreTrainedModel) -> Module:
    """The module that computes hidden states: the base model, which a few classes do not declare
    correctly."""
    has_head = model.get_output_embeddings() is not None
    base: Module = model.base_model
    if base is not model or not has_head:
        return base
    inner = (child for child in Module.children(model) if hasattr(child, "config"))
    return next(inner, base)


def forward_logprobs(model: PreTrainedModel, pack: Pack, way: Way | None = None) -> Tensor:
    """log pi(action | all tokens before it in its row) at each action's temperature, [n]. way: see
    `hidden_states`.

    float32 (float64 for a float64 model), on the model's device, differentiable in its weights."""
    logprobs_n, _ = action_logprobs(
        model.get_output_embeddings(),
        hidden_states(model, pack, way),
        pack.actions.to(model.device),
        pack.temperature.to(model.device),
    )
    return logprobs_n


def incompatibility(model: PreTrainedModel) -> str | None:
    """`attention.incompatibility`, which also checks the device of the model."""
    if model.device.type not in ("cpu", "cuda"):
        return f"is on device {model.device.type!r}, for which there is no tree attention"
    return attention.incompatibility(model)


def _hidden_by_branch(model: PreTrainedModel, pack: Pack, *, alone: bool) -> Tensor:
    """`hidden_states` of branches by the model's own forward pass, alone or in right-padded
    batches. Padding follows all real tokens and the model is causal, so it has no effect, even for
    recurrent decoders."""
    if inputs_of(model):
        raise PolicyError(
            f"model type {model.config.model_type!r} {prove(model).reason}, and its calls with "
            "images can be computed in no other way; choose another model that reads images"
        )
    number = torch.arange(len(pack.end))
    leaves = (pack.end == number + 1).nonzero().flatten()
    # The first leaf at or after a token is in the token's subtree.
    branch = torch.searchsorted(leaves, pack.states)
    lengths = (pack.positions[leaves] + 1).tolist()
    budget = 0 if alone else len(pack.tokens)
    parts, order = [], []
    for micro in _micro_batches(lengths, budget, attention.longrope_threshold(model)):
        ends = leaves[micro][:, None]
        paths = [pack.tokens[path] for path in (number <= ends) & (pack.end > ends)]
        tokens_BL = pad_sequence(paths, batch_first=True).to(model.device)
        hidden_BLH = decoder_of(model)(input_ids=tokens_BL, use_cache=False).last_hidden_state
        row, at = (branch == torch.tensor(micro)[:, None]).nonzero(as_tuple=True)
        parts.append(
            hidden_BLH[row.to(model.device), pack.positions[pack.states[at]].to(model.device)]
        )
        order.append(at)
    return torch.cat(parts)[torch.cat(order).argsort().to(model.device)]


def _micro_batches(
    lengths: Sequence[int], token_budget: int, longrope_threshold: int | None = None
) -> Iterator[list[int]]:
    """Yield lists of indices of sequences of similar length. Each list, padded to its longest, has
    at most `token_budget` tokens, or a single sequence; none has sequences on both sides of
    `longrope_threshold`."""
    micro: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        size = lengths[index]
        crosses = (
            longrope_threshold is not None
            and micro
            and lengths[micro[0]] <= longrope_threshold < size
        )
        if micro and (crosses or (len(micro) + 1) * size > token_budget):
            yield micro
            micro = []
        micro.append(index)
    if micro:
        yield micro


def check_model(model: PreTrainedModel) -> None:
    """Raise PolicyError if `forward_logprobs` would not return the log-probs of the model."""
    head = model.get_output_embeddings()
    tokens = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        try:
            hidden = decoder_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
            logits = model(input_ids=tokens, use_cache=False).logits
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that is not a decoder may raise anything
            raise PolicyError(
                f"{type(model).__name__}: it cannot be computed from token ids alone "
                f"({_one_line(error)}); choose a decoder that reads text"
            ) from error
        # A projection before the head may change the width.
        fits = head is not None and head.weight.shape[-1] == hidden.shape[-1]
        same = fits and torch.equal(head(hidden), logits)
    if not same:
        raise PolicyError(
            f"{type(model).__name__}: its logits are not the output of its language-model head "
            "(soft-capping or scaling follows the head, or layers come before it); choose a model "
            "without that"
        )
    prove(model)


def _is_causal(model: PreTrainedModel, rows: Sequence[Tensor]) -> bool:
    """Whether log-probs of the model's own forward pass do not depend on later tokens."""

    def logprobs(tokens: Tensor) -> Tensor:
        logprobs_TV: Tensor = (
            model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        )
        return logprobs_TV

    with torch.no_grad():
        for tokens in rows:
            full = logprobs(tokens)
            tolerance = TOLERANCE if full.dtype in (torch.float32, torch.float64) else SHORT_FLOATS
            for size in {len(tokens) - 1, max(1, len(tokens) - 10), len(tokens) // 2}:
                gap = (full[:size] - logprobs(tokens[:size])).abs().max()
                if not float(gap) <= tolerance:
                    return False
    return True


def supported_packing(model: PreTrainedModel, packing: Packing) -> Packing:
    """`packing`, or "rows" if only that is correct; logs one line on how the model is computed and
    why. Raises PolicyError for a model that cannot be computed."""
    proof, name = prove(model), repr(model.config.model_type)
    possible: Packing = "rows" if packing == "rows" else proof.packing
    if proof.way == "packed" and possible == packing:
        log_phase(log, f"model type {name} is trained in packs ({possible}): {proof}")
        return possible
    ways = {
        "packed": "its rows are packed without sharing prefixes",
        "padded": "its branches are computed one by one, padded to the longest",
        "plain": "its rows are computed one at a time by its own forward pass, which is slow",
    }
    log.warning(
        "learner.packing = %r: model type %s %s, so %s", packing, name, proof.reason,
        ways[proof.way],
    )  # fmt: skip
    return possible


# -- the proof -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """Largest differences from the model's own forward pass: of log-probs in nats, of gradients
    relative to the largest one."""

    logprobs: float
    gradients: float

    def __bool__(self) -> bool:
        return not (self.logprobs <= TOLERANCE and self.gradients <= TOLERANCE)

    def __str__(self) -> str:
        return f"log-probs by {self.logprobs:.1g} and gradients by {self.gradients:.1g}"


@dataclass(frozen=True, slots=True)
class Proof:
    """The fastest correct way to compute a model: with its own log-probs and gradients."""

    way: Way
    packing: Packing
    reason: str = ""  # why no faster way is correct, as the predicate of a sentence about the model
    gap: Gap | None = None  # difference from the model's own computation

    def __str__(self) -> str:
        return f"a small copy differs from its own forward pass in {self.gap}"


_proofs: dict[object, Proof | PolicyError] = {}


def prove(model: PreTrainedModel) -> Proof:
    """Compare the ways to compute a model with its own forward pass, one row at a time, on a small
    copy (see `scaled`). Once for each configuration and process.

    Raises PolicyError if not even the plain way gives the model's own log-probs."""
    if (cached := vars(model).get(ATTRIBUTE)) is not None:
        return cached  # type: ignore[no-any-return]
    key = (copy_key(model), incompatibility(model))
    if key not in _proofs:
        # Gradients are compared, too, and the caller may have switched them off.
        with computing_with(1), torch.inference_mode(False), torch.enable_grad():
            _proofs[key] = _proof(model)
    proof = _proofs[key]
    if isinstance(proof, PolicyError):
        raise proof
    setattr(model, ATTRIBUTE, proof)
    return proof


def _proof(model: PreTrainedModel) -> Proof | PolicyError:
    rows = proof_rows(attention.longrope_threshold(model) is not None)
    try:
        copy = scaled_copy(model)
        exact = attempt(lambda: own_results(copy, rows))
        if not exact[0].isfinite().all():
            raise ScalingError("its log-probs are not finite")
        causal = _is_causal(copy, [row.tokens for row in rows])
    except ScalingError as error:
        return _proof_of_itself(model, f"has no small copy to compare with ({error})")
    if not causal:
        return _not_causal(model)
    reason = incompatibility(model) or ""
    if not reason:
        trie, packed = (
            _gap(scaled_copy(model), rows, exact, packing, "packed") for packing in ("trie", "rows")
        )
        if isinstance(trie, Gap) and not trie:
            return Proof("packed", "trie", gap=trie)
        if isinstance(packed, Gap) and not packed:
            return Proof("packed", "rows", f"differs from its own forward pass in {trie}", packed)
        reason = f"differs from its own forward pass in {packed} if rows are packed"
    for way in ("padded", "plain"):
        gap = _gap(copy, rows, exact, "rows", way)
        if isinstance(gap, Gap) and not gap and (way == "plain" or _rounds_little(model, rows)):
            return Proof(way, "rows", reason, gap)
        if way == "padded":
            reason += f", and in {gap} if they are padded"
    return PolicyError(
        f"{type(model).__name__}: its log-probs cannot be computed here, even one row at a time "
        f"({gap} off its own output); choose another model"
    )


def _proof_of_itself(model: PreTrainedModel, reason: str) -> Proof | PolicyError:
    """Test a model without a small copy: its own forward pass over a row must be differentiable,
    reproducible and causal."""
    # A critic's decoder: its values are compared elsewhere.
    if model.get_output_embeddings() is None:
        return Proof("plain", "rows", reason)
    size = model.get_input_embeddings().num_embeddings  # the rows use the vocabulary of the copies
    tokens = proof_rows()[-1].tokens.remainder(size).to(model.device)

    def logits() -> Tensor:
        logits_TV: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        return logits_TV

    try:
        attempt(lambda: logits().sum()).detach()
        with torch.no_grad():
            same = attempt(lambda: torch.equal(logits(), logits()))
        causal = attempt(lambda: _is_causal(model, [tokens]))
    except ScalingError as error:
        return PolicyError(
            f"{type(model).__name__}: its own forward pass over {len(tokens)} tokens fails "
            f"({error}); choose another model"
        )
    if not same:
        return PolicyError(
            f"{type(model).__name__}: its own forward pass gives other log-probs each time, so "
            "what is sampled is not what would be trained; choose another model"
        )
    return Proof("plain", "rows", reason) if causal else _not_causal(model)


def _not_causal(model: PreTrainedModel) -> PolicyError:
    ahead = (
        f"{type(model).__name__}: its own forward pass makes a token's log-prob depend on the "
        "tokens after it, so what is sampled is not what would be trained"
    )
    if hasattr(sys.modules[type(model).__module__], KERNEL):
        return PolicyError(
            f"{ahead}: without the kernels of mamba_ssm, transformers {transformers.__version__} "
            "computes its state-space layers wrongly in sequences longer than a chunk; install "
            f"transformers {COMPUTES_CHUNKS} or newer, or choose a model without such layers"
        )
    return PolicyError(f"{ahead}; choose a causal decoder")


def _rounds_little(model: PreTrainedModel, rows: Sequence[TokenRow]) -> bool:
    """Whether padding changes gradients only by rounding errors as small as those from a different
    order of sums, tested on copies with other weights. Some recurrent layers amplify rounding a
    thousand times."""
    for seed in (1, 2, 7):
        copy = scaled_copy(model, seed)
        gap = _gap(copy, rows, own_results(copy, rows), "rows", "padded")
        if not isinstance(gap, Gap) or gap.gradients > ROUNDING:
            return False
    return True


def proof_rows(both_regimes: bool = False) -> list[TokenRow]:
    """Rows longer than every window of a copy, with shared prefixes of several lengths, and short
    rows. both_regimes: also rows shorter than the original context of a longrope model."""
    draw = torch.Generator().manual_seed(1)

    def some(n: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (n,), generator=draw).tolist()

    trunk = some(2 * ORIGINAL - 4)
    deep = [*trunk, *some(9)]
    sequences = [
        [*trunk, *some(16)], [*deep, *some(10)], [*deep, *some(3)], [*trunk[:12], *some(26)],
        some(7), *([some(ORIGINAL - 2)] if both_regimes else ()), some(41),
    ]  # fmt: skip
    rows = []
    for tokens in sequences:
        actions = torch.arange(3, len(tokens), 2 if len(tokens) > 40 else 1)
        ones = torch.ones(len(actions))
        rows.append(TokenRow(torch.tensor(tokens), actions, ones, ones, torch.zeros_like(actions)))
    return rows


Results = tuple[Tensor, list[Tensor | None]]
"""Log-probs of the actions of rows, in their order, and gradients of their weighted sum."""


def own_results(model: PreTrainedModel, rows: Sequence[TokenRow]) -> Results:
    """Results of the model's own forward pass, one row at a time."""
    parts = []
    for row in rows:
        # `int(row.actions[-1])`: the prediction after the last action is not needed
        logits = model(input_ids=row.tokens[None, : int(row.actions[-1])], use_cache=False).logits
        parts.append(
            logits[0, row.actions - 1].log_softmax(-1).gather(1, row.tokens[row.actions, None])
        )
    return _with_gradients(model, torch.cat(parts)[:, 0])


def results(
    model: PreTrainedModel, rows: Sequence[TokenRow], packing: Packing, way: Way
) -> Results:
    """Results as the learner computes them."""
    logprobs = torch.zeros(sum(len(row.actions) for row in rows))
    scored = [
        (pack.index, forward_logprobs(model, pack, way)) for pack in pack_rows(rows, packing, 10**6)
    ]
    index, values = (torch.cat(each) for each in zip(*scored, strict=True))
    return _with_gradients(model, logprobs.index_put((index,), values))


def _with_gradients(model: PreTrainedModel, logprobs: Tensor) -> Results:
    weights = torch.linspace(-1, 1, len(logprobs))
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad((weights * logprobs).sum(), learned, allow_unused=True)
    return logprobs.detach(), list(gradients)


def gap_between(computed: Results, exact: Results) -> Gap:
    """The gap between two results. NaN counts as infinite, and a missing gradient as zeros."""
    largest, apart = 0.0, [0.0]
    for gradient, exact_gradient in zip(computed[1], exact[1], strict=True):
        if exact_gradient is not None and exact_gradient.numel():
            largest = max(largest, float(exact_gradient.abs().max()))
        if gradient is not None or exact_gradient is not None:
            difference = (0 if gradient is None else gradient) - (
                0 if exact_gradient is None else exact_gradient
            )
            apart.append(float(torch.as_tensor(difference).abs().amax()))
    gaps = float((computed[0] - exact[0]).abs().max()), max(apart) / (largest or 1.0)
    return Gap(*(math.inf if math.isnan(gap) else gap for gap in gaps))


def _gap(
    copy: PreTrainedModel, rows: Sequence[TokenRow], exact: Results, packing: Packing, way: Way
) -> Gap | str:
    """The gap of a way, or the error that it ends with."""
    try:
        return gap_between(results(copy, rows, packing, way), exact)
    except Exception as error:  # noqa: BLE001  a model fails in its own way
        return f"everything ({_one_line(error)})"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
