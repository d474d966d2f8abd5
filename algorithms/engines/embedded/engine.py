"""The embedded engine: continuous batching, in which calls join and leave at every token; sampling;
and a slow forward pass that is correct for every decoder.

Owns the KV cache and one thread, the only one that runs the model or changes the rows. Invariant:
each step is one forward pass with at least one token of every running row; weights change between
two steps (`swap`), or while there is no unfinished request, and then `swap` must follow. A request
never reads keys of a version older than that of its start.

Sampling is by pure functions. A token is the inverse of the cumulative distribution at one uniform
number, which depends only on the call's seed and its number of tokens: other calls of the batch
cannot influence it. The inverse is computed in two levels, because a float64 sum over a large
vocabulary costs more than its softmax.

`PlainForward` is the model's own forward pass, one call at a time, for models that the engine
cannot compute in batches (see `proof`). `cached` keeps the model's own cache for each call; without
one, each token costs a pass over all tokens before it.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.engines.embedded import attention
from agentrl.algorithms.engines.embedded.attention import (
    GenerationRequest,
    KVPool,
    PrefillChunk,
    RowTable,
    StepPlan,
    TokenUpdate,
    cache_argument,
)
from agentrl.algorithms.model import products
from agentrl.algorithms.model.attention import UNUSED, whole_blocks
from agentrl.algorithms.model.load import Adapters, Model
from agentrl.algorithms.model.scaled import inputs_of, rotary_positions
from agentrl.core.errors import AgentRLError, PolicyError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK = 256  # tokens per sum of the first level
IMPOSSIBLE = -9999.0  # replaces minus infinity, which JSON does not have
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], counters: Ints) -> Floats:
    """The `counters`-th number in [0, 1) of each seed's SplitMix64 stream (Steele et al. 2014)."""
    bits = _mix(_mix(seeds) + _GOLDEN * counters.astype(np.uint64)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def sample(
    logits_BV: Tensor, temperature: Floats, top_p: Floats, top_k: Ints, uniform: Floats
) -> tuple[Tensor, Tensor]:
    """Sampled tokens, int64 [B], and their log-probs, float32 [B].

    Temperature 0 takes the most likely token. Log-probs are those of the distribution at the
    temperature (at 1 if it is 0), before top-k (0: all) and top-p."""
    greedy = temperature == 0
    weights = torch.softmax(_scaled(logits_BV, temperature), dim=-1, dtype=torch.float32)
    if greedy.all():
        tokens = weights.argmax(dim=-1)
    else:
        tokens = _inverse(_filtered(weights, top_p, top_k), torch.from_numpy(uniform))
        if greedy.any():
            mask = torch.from_numpy(greedy).to(tokens.device)
            tokens = torch.where(mask, weights.argmax(dim=-1), tokens)
    return tokens, weights.gather(1, tokens[:, None])[:, 0].log()


def top_logprobs(
    logits_BV: Tensor, temperature: Floats, top: Ints
) -> list[list[tuple[int, float]]]:
    """The `top` most likely tokens of each row, with log-probs as in `sample`."""
    logprobs = torch.log_softmax(_scaled(logits_BV, temperature), dim=-1, dtype=torch.float32)
    values, tokens = logprobs.topk(int(top.max()), dim=-1)
    rows = zip(tokens.tolist(), values.clamp(min=IMPOSSIBLE).tolist(), top.tolist(), strict=True)
    return [
        list(zip(ids, logprobs_of_row, strict=True))[:count] for ids, logprobs_of_row, count in rows
    ]


def _scaled(logits_BV: Tensor, temperature: Floats) -> Tensor:
    """The logits divided by the temperature, in float32; at 1 as they are."""
    if (temperature == 1).all():
        return logits_BV
    scale = np.where(temperature == 0, 1.0, temperature).astype(np.float32)
    return logits_BV.float() / torch.from_numpy(scale).to(logits_BV.device)[:, None]


def _inverse(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Each row's token at which its cumulative weights pass this share of their sum, int64 [B]."""
    device, vocabulary = weights_BV.device, weights_BV.shape[-1]
    covered = vocabulary // BLOCK * BLOCK
    sums = weights_BV[:, :covered].reshape(len(weights_BV), -1, BLOCK).sum(-1)
    blocks = torch.cat([sums, weights_BV[:, covered:].sum(-1, keepdim=True)], -1)
    block, share = _passed(blocks, uniform_B.to(device)[:, None])
    places = block * BLOCK + torch.arange(BLOCK, device=device)
    inside = weights_BV.gather(1, places.clamp(max=vocabulary - 1))
    inside[places >= vocabulary] = 0
    return (block * BLOCK + _passed(inside, share)[0])[:, 0].clamp_(max=vocabulary - 1)


def _passed(weights_BN: Tensor, share_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The index at which cumulative weights pass a share of their sum, int64 [B, 1], and the share
    of that weight which is before this point, float64 [B, 1]."""
    # float64: in float32 the cumulative sum would lose rare tokens
    cumulative = weights_BN.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # A product that is rounded up to the sum would pass no weight.
    goal = torch.minimum(share_B1 * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, goal, right=True).clamp_(max=weights_BN.shape[-1] - 1)
    weight = weights_BN.gather(1, index).double()
    return index, (goal - cumulative.gather(1, index) + weight).div_(weight).clamp_(0, 1)


def _filtered(weights_BV: Tensor, top_p: Floats, top_k: Ints) -> Tensor:
    """Set the weights outside top-k and top-p to 0; top-p is a fraction of the mass after top-k."""
    rows = np.flatnonzero((top_p < 1) | (top_k > 0))
    if not rows.size:
        return weights_BV
    device, vocabulary = weights_BV.device, weights_BV.shape[-1]
    at = torch.from_numpy(rows).to(device)
    ordered, order = weights_BV[at].sort(dim=-1, descending=True, stable=True)
    limit = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary)[rows]).to(device)[:, None]
    ordered[torch.arange(vocabulary, device=device) >= limit] = 0
    mass = torch.from_numpy(top_p[rows]).to(device)[:, None]
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    # a token stays if those before it have less than the mass, so the first always stays
    ordered[cumulative - ordered >= mass * cumulative[:, -1:]] = 0
    weights_BV[at] = torch.zeros_like(ordered).scatter_(1, order, ordered)
    return weights_BV


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


# Names of the cache argument in model classes: transformers 5.24 has renamed the first two.
CACHES = ("cache", "past_key_values", "cache_params", "state")


class PlainForward:
    """Logits of a model after each running row's last token. Raises PolicyError if the model has no
    cache to keep."""

    def __init__(self, model: Model, *, cached: bool) -> None:
        names = inspect.signature(model.forward).parameters
        self.model = model
        self.cache_name = next((name for name in CACHES if name in names), "") if cached else ""
        if cached and not self.cached:
            raise PolicyError("its forward pass takes no cache")
        # Others compute logits for the whole prompt.
        self.keep: dict[str, int] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        # Some model classes need this argument before transformers 5.4.
        self.placed = "cache_position" in names
        self.caches: dict[GenerationRequest, tuple[int, Any]] = {}  # (tokens in the cache, cache)

    @property
    def cached(self) -> bool:
        return bool(self.cache_name)

    def logits(
        self, rows: RowTable, adapted: Callable[[Ints], AbstractContextManager[None]]
    ) -> Tensor:
        """[n, V]. adapted: context that applies to each token the adapter of its policy."""
        running = rows.calls
        running_caches = {call: cache for call, cache in self.caches.items() if call in running}
        self.caches, logits = running_caches, []
        for row, call in enumerate(running):
            total = int(rows.known[row])
            # The cache of a row with dropped keys was computed with older weights.
            before, cache = self.caches.get(call, (0, None)) if rows.length[row] else (0, None)
            tokens = torch.from_numpy(rows.tokens[row, before:total].astype(np.int64))[None]
            with adapted(np.full(total - before, rows.policy[row])):
                output, cache = self._call(tokens, cache, before)
            logits.append(output[0, -1])
            if self.cached:
                self.caches[call] = total, cache
            rows.length[row] = total
        return torch.stack(logits)

    def _call(self, tokens: Tensor, cache: Any, before: int) -> tuple[Tensor, Any]:
        device = next(self.model.parameters()).device
        state = {self.cache_name: cache} if cache is not None else {}
        if state and self.placed:
            state["cache_position"] = torch.arange(before, before + tokens.shape[1], device=device)
        output = self.model(
            input_ids=tokens.to(device), use_cache=self.cached, **state, **self.keep
        )
        return output.logits, getattr(output, self.cache_name) if self.cached else None


PREFILL_TOKENS = 512  # maximum prompt tokens per step; more would stall running requests
WORTH_WAITING = 16  # a request waits to copy this many prefix tokens that another is computing
CLOSED = "the policy server is shutting down"
ENDED = "the embedded engine ended with "  # followed by the cause

log = logging.getLogger("agentrl.algorithm")

EngineWay = Literal["batched", "cached", "whole"]
"""`batched`: all rows in one pass (see `attention`); else the model's own forward pass for one row
after the other (see `plain`), with the model's own cache, or from the first token each time."""
TokenUpdates = list[tuple[GenerationRequest, TokenUpdate]]


def sentence_of(error: BaseException) -> str:
    """The error's first line, after its kind where the line alone is not enough."""
    line = (str(error).splitlines() or [""])[0]
    return (
        line
        if line and isinstance(error, RuntimeError | AgentRLError)
        else f"{type(error).__name__}: {line}"
    )


class Engine:
    """Completes calls with any Hugging Face decoder."""

    def __init__(
        self,
        model: Model,
        *,
        eos: Collection[int],
        max_batch: int,
        max_context: int,
        threads: int,
        deliver: Callable[[TokenUpdates], None],
        adapters: Adapters | None = None,
        policies: Sequence[str | None] = (None,),
        dropped: Callable[[str | None], object] = lambda adapter: None,
        way: EngineWay = "batched",
    ) -> None:
        """deliver: called on the engine's thread with all token updates of a step. policies: the
        adapter of each policy by number; None: the model without adapters. dropped: called on the
        engine's thread with the adapter of a retired policy once no request uses it. way: how the
        model is computed; see `proof`."""
        if way == "batched":
            attention.install_attention(model)
        products.install(model)
        config: Any = model.config
        self.model, self.deliver, self.threads, self.adapters = model, deliver, threads, adapters
        self.dropped = dropped
        self.inputs = inputs_of(model)
        self.call: Callable[..., Any] = self.inputs.generate if self.inputs else model
        self.max_context = max_context
        self.policies = dict(enumerate(policies))  # number -> adapter
        self.versions = dict.fromkeys(self.policies, 0)
        self.retired: set[int] = set()  # policies to drop after their last request
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        # One idle row per running row keeps the prefix for the next call of its conversation.
        self.rows = RowTable(max_batch, idle=max_batch, context=max_context)
        # Some models do not have these numbers, and do not use the pool.
        layers = config.get_text_config().num_hidden_layers if way == "batched" else 0
        block, largest = (whole_blocks(size, self.dtype) for size in (1, max_context))
        self.cache_argument = cache_argument(model)
        self.pool = KVPool(layers, len(self.rows.length) + 1, block, largest)
        self.plain = None if way == "batched" else PlainForward(model, cached=way == "cached")
        self.eos = np.zeros(config.get_text_config().vocab_size, np.bool_)
        self.eos[list(eos)] = True
        self.waiting: deque[GenerationRequest] = deque()
        self.commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.lock = threading.Lock()  # guards `closing`: no command is queued after the thread ends
        self.closing = False
        self.failure: Future[BaseException] = Future()  # the error that ended the thread
        self.ending = CLOSED  # why requests are not answered once the thread has ended

    def start(self) -> None:
        self.thread.start()

    def submit(self, call: GenerationRequest) -> None:
        """Queue a request. Exactly one update, its last, will have `finish` set."""
        if not self._queue(lambda: self.waiting.append(call)):
            self.deliver([(call, TokenUpdate([], [], "error", self.ending))])

    def cancel(self, call: GenerationRequest) -> None:
        """End a request whose client has disconnected, if it is unfinished."""
        self._queue(lambda: self._cancel(call))

    def swap(
        self,
        policy: int = 0,
        version: int = 0,
        load: Callable[[], None] = lambda: None,
    ) -> Future[float]:
        """Between two steps, `load` this version of a policy and drop its prefix cache. Running
        requests continue with the new weights, and recompute their keys. Returns the seconds for
        which the engine paused."""
        paused: Future[float] = Future()
        if not self._queue(lambda: self._swap(paused, policy, version, load)):
            paused.set_exception(PolicyError(self.ending))
        return paused

    def retire(self, policy: int) -> None:
        """Drop a policy once its last request has ended. No more may be submitted for it."""

        def retire() -> None:
            self.retired.add(policy)
            self._drop_retired()

        self._queue(retire)

    def close(self) -> None:
        """Fail all unfinished requests and end the thread."""
        self._queue(self._close)
        self.thread.join()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def _queue(self, command: Callable[[], None]) -> bool:
        with self.lock:
            if not self.closing:
                self.commands.put(command)
            return not self.closing

    @torch.inference_mode()
    def _main(self) -> None:
        try:
            while self._run_commands():
                self.compute_step()
        finally:
            if (error := sys.exception()) is not None:
                self.ending = ENDED + sentence_of(error)
                self.failure.set_result(error)
            with self.lock:
                self.closing = True
            while not self.commands.empty():
                self.commands.get()()
            self._fail(self.ending)

    def _run_commands(self) -> bool:
        """Run all queued commands; wait for one if there is no request. False: closing."""
        idle = not (self.rows.n or self.waiting)
        while True:
            while idle and not self.closing:
                self.commands.get()()
                idle = not self.waiting
                if not idle:
                    # MKL has one number per process, which the learner may have changed.
                    torch.set_num_threads(self.threads)
            try:
                self.commands.get_nowait()()
            except Empty:
                return not self.closing

    def compute_step(self) -> None:
        """Start waiting requests and sample a token for each row; on the thread that runs it."""
        self._admit()
        self._step()

    def _admit(self) -> None:
        """Start waiting requests, oldest first, except those with a prefix that is being
        computed."""
        at = 0
        while at < len(self.waiting) and self.rows.n < self.rows.limit:
            call = self.waiting[at]
            source, shared, soon = self.rows.source(call.prompt, call.policy)
            if soon - shared >= WORTH_WAITING:
                at += 1
            else:
                self.rows.add(call, self.pool, source, shared)
                del self.waiting[at]  # only now: if `add` raises, the request is still answered

    def _step(self) -> None:
        rows, n = self.rows, self.rows.n
        if not n:
            return
        try:
            logits = self._forward()
        except Exception as error:
            log.exception("the model failed")
            self._fail(f"the model failed: {sentence_of(error)}")
            return
        counters = rows.known[:n] - rows.prompt[:n]
        tokens_n, logprobs_n = sample(
            logits,
            rows.temperature[:n],
            rows.top_p[:n],
            rows.top_k[:n],
            uniforms(rows.seed[:n], counters),
        )
        if wanted := np.flatnonzero(rows.top[:n]).tolist():
            top_logprobs_n = top_logprobs(
                logits[wanted], rows.temperature[wanted], rows.top[wanted]
            )
            for row, top in zip(wanted, top_logprobs_n, strict=True):
                if rows.length[row] == rows.known[row]:  # the row's prompt is complete
                    rows.top_logprobs[row].append(top)
        self._record(tokens_n.cpu().numpy(), logprobs_n.cpu().numpy())

    def _forward(self) -> Tensor:
        """Run the model on uncached tokens; returns logits [n, V] after each row's last one."""
        if self.plain:
            return self.plain.logits(self.rows, self._adapted)
        rows, pool, n = self.rows, self.pool, self.rows.n
        lengths, order = rows.length[:n], np.arange(n)
        pool.reserve(int(rows.known[:n].max()), rows.length)
        before = rows.known[:n] - lengths - 1  # tokens to feed before the last one
        chunks: list[PrefillChunk] = []
        fed_rows, fed_positions, start = [], [], 0
        for row in np.flatnonzero(before):
            size = min(int(before[row]), PREFILL_TOKENS - start)
            before[row] = size
            if size:
                first = int(lengths[row])
                chunks.append(PrefillChunk(int(row), start, size, first + size))
                fed_rows.append(np.full(size, row))
                fed_positions.append(np.arange(first, first + size))
                start += size
        last = lengths + before
        # A smaller step would add in another order; the padding writes to a separate row.
        few = attention.FEW_ROWS
        padding = max(few - start - n, 0)
        source = np.concatenate([order[:1].repeat(padding), *fed_rows, order])
        positions = np.concatenate([np.zeros(padding, np.int64), *fed_positions, last])
        tokens, at = rows.tokens[source, positions], source.copy()
        at[:padding] = pool.rows - 1
        ids_N, at_N, positions_N = (
            torch.from_numpy(values).to(self.device)
            for values in (tokens.astype(np.int64), at, positions)
        )
        pool.set_write_positions(at_N, positions_N)
        rotary = rotary_positions([call.rotary for call in rows.calls], source, positions)
        longest, device = int(last.max()) + 1, self.device.type
        context = attention.keys_read(longest, pool.capacity, self.dtype, device)
        with self._adapted(rows.policy[source]):
            logits: Tensor = self.call(
                input_ids=ids_N[None],
                position_ids=torch.from_numpy(rotary).to(self.device)[..., None, :],
                attention_mask=UNUSED,
                use_cache=True,
                logits_to_keep=max(n, few),
                plan=StepPlan(chunks, positions_N[-n:], context, padding),
                **{self.cache_argument: pool},
            ).logits[0, -n:]
        rows.length[:n] = last + 1
        return logits

    def _adapted(self, policies: Ints) -> AbstractContextManager[None]:
        """Context that applies to each token the adapter of its policy (number, int64 [N])."""
        if self.adapters is None:
            return nullcontext()
        present = np.unique(policies).tolist()
        if len(present) == 1:
            return self.adapters.using(self.policies[present[0]], wide=True)
        return self.adapters.routed(
            [
                (adapter, torch.from_numpy(np.flatnonzero(policies == number)).to(self.device))
                for number in present
                if (adapter := self.policies[number]) is not None
            ]
        )

    def _record(self, tokens: Ints, logprobs: NDArray[np.float32]) -> None:
        """Append sampled tokens to rows with a complete prompt; deliver updates, end requests."""
        rows, n = self.rows, self.rows.n
        if not np.isfinite(logprobs).all():
            self._fail("the model's log-probs are not finite: its weights are broken")
            return
        at = np.flatnonzero(rows.length[:n] == rows.known[:n])
        tokens, logprobs = tokens[at], logprobs[at]
        rows.tokens[at, rows.known[at]] = tokens
        rows.logprobs[at, rows.known[at]] = logprobs
        rows.known[at] += 1
        stopped, full = self.eos[tokens] & ~rows.ignore_eos[at], rows.known[at] >= rows.end[at]
        updates: TokenUpdates = []
        ended: list[int] = []
        for index in np.flatnonzero(stopped | full | rows.watched[at]).tolist():
            row, token = int(at[index]), int(tokens[index])
            call, version = rows.calls[row], self.versions[int(rows.policy[row])]
            stop = bool(stopped[index]) or (call.stop is not None and call.stop(token))
            finish = "stop" if stop else "length" if full[index] else None
            if call.stream:
                spans = [(0, version)]
                top = rows.top_logprobs[row][-1:]
                logprob = float(logprobs[index])
                update = TokenUpdate([token], [logprob], finish, spans=spans, top=top)
                updates.append((call, update))
            elif finish:
                spans = rows.spans[row] or [(0, version)]
                top = rows.top_logprobs[row]
                update = TokenUpdate(*rows.completion(row), finish, spans=spans, top=top)
                updates.append((call, update))
            if finish:
                ended.append(row)
        for row in reversed(ended):  # from the end, because the last row fills the gap
            rows.remove(row, self.pool)
        if updates:
            self.deliver(updates)
        if ended and self.retired:
            self._drop_retired()

    def _swap(
        self, paused: Future[float], policy: int, version: int, load: Callable[[], None]
    ) -> None:
        if not paused.set_running_or_notify_cancel():  # cancelled
            return
        started = time.perf_counter()
        try:
            load()
        except RuntimeError as error:
            paused.set_exception(error)
            return
        if self.policies.get(policy) is None:  # an adapter does not change the model's weights
            products.forget(self.model)
            if self.inputs:
                self.inputs.changed()
        self.rows.change_version(policy, self.versions[policy], version)
        self.versions[policy] = version
        paused.set_result(time.perf_counter() - started)

    def _drop_retired(self) -> None:
        busy = {*self.rows.policy[: self.rows.n].tolist(), *(call.policy for call in self.waiting)}
        for number in self.retired - busy:
            self.rows.forget(number)
            self.retired.remove(number)
            del self.versions[number]
            self.dropped(self.policies.pop(number))

    def _cancel(self, call: GenerationRequest) -> None:
        if call in self.waiting:
            self.waiting.remove(call)
        elif call in self.rows.calls:
            self.rows.remove(self.rows.calls.index(call), self.pool)
        else:
            return
        self.deliver([(call, TokenUpdate([], [], "cancelled"))])
        self._drop_retired()

    def _close(self) -> None:
        with self.lock:
            self.closing = True

    def _fail(self, sentence: str) -> None:
        calls = [*self.rows.calls, *self.waiting]
        self.waiting.clear()
        while self.rows.n:
            self.rows.remove(self.rows.n - 1, self.pool, keep=False)
        # A key that is not finite makes attention NaN even where it is masked.
        self.rows.forget()
        self.pool.wipe()
        if calls:
            self.deliver([(call, TokenUpdate([], [], "error", sentence)) for call in calls])
        self._drop_retired()
