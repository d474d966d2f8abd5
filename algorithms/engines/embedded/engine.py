"""Continuous batching: calls join and leave the running batch at every token.

Owns the KV cache and one thread, the only one that runs the model or changes the rows. Always true:
each step is one forward pass with at least one token of every running row; weights change between
two steps (`swap`), or while there is no unfinished request, and then `swap` must follow. A request
never reads keys that were computed with a version older than the one it begins under.
"""

from __future__ import annotations

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

from agentrl.algorithms.engines.embedded import attention, packed
from agentrl.algorithms.engines.embedded.attention import PrefillChunk, StepPlan
from agentrl.algorithms.engines.embedded.kv_cache import (
    GenerationRequest,
    KVPool,
    RowTable,
    TokenUpdate,
    cache_argument,
)
from agentrl.algorithms.engines.embedded.plain import PlainForward
from agentrl.algorithms.engines.embedded.sampler import Ints, likeliest, sample, uniforms
from agentrl.algorithms.model.adapters import Adapters
from agentrl.algorithms.model.attention import UNUSED, whole_blocks
from agentrl.algorithms.model.inputs import inputs_of, rotary_positions
from agentrl.algorithms.model.load import Model
from agentrl.errors import AgentRLError, PolicyError

PREFILL_TOKENS = 512  # most prompt tokens per step; more would stall running requests
WORTH_WAITING = 16  # a request waits to copy this many prefix tokens that another is computing
CLOSED = "the policy server is shutting down"
ENDED = "the embedded engine ended with "  # and its cause

log = logging.getLogger("agentrl.algorithm")

EngineWay = Literal["batched", "cached", "whole"]
"""`batched`: all rows in one pass (see `attention`); else the model's own forward pass for one row
after the other (see `plain`), with the model's own cache, or from the first token each time."""
TokenUpdates = list[tuple[GenerationRequest, TokenUpdate]]


def sentence_of(error: BaseException) -> str:
    """The error's first line, after its kind where the line alone does not tell."""
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
            attention.install(model)
        packed.install(model)
        config: Any = model.config
        self.model, self.deliver, self.threads, self.adapters = model, deliver, threads, adapters
        self.dropped = dropped
        self.inputs = inputs_of(model)
        self.call: Callable[..., Any] = self.inputs.generate if self.inputs else model
        self.max_context = max_context
        self.policies = dict(enumerate(policies))  # by number
        self.versions = dict.fromkeys(self.policies, 0)
        self.retired: set[int] = set()  # policies to drop after their last request
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        # An idle row for each running one keeps the prefix of the next call of its conversation.
        self.rows = RowTable(max_batch, idle=max_batch, context=max_context)
        # Some models have no such number, and none of the pool.
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
        *,
        keep: bool = False,
    ) -> Future[float]:
        """Between two steps, `load` this version of a policy and drop its prefix cache. Running
        requests continue with the new weights; they recompute their keys, or `keep` them. Returns
        the seconds for which the engine paused."""
        done: Future[float] = Future()
        if not self._queue(lambda: self._swap(done, policy, version, load, keep)):
            done.set_exception(PolicyError(self.ending))
        return done

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
        """Start waiting requests, oldest first, but for those whose prefix is being computed."""
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
            found = likeliest(logits[wanted], rows.temperature[wanted], rows.top[wanted])
            for row, top in zip(wanted, found, strict=True):
                if rows.length[row] == rows.known[row]:  # its prompt is complete
                    rows.likeliest[row].append(top)
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
        # A smaller step would add in another order; the padding writes to a row of its own.
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
                top = rows.likeliest[row][-1:]
                logprob = float(logprobs[index])
                update = TokenUpdate([token], [logprob], finish, spans=spans, top=top)
                updates.append((call, update))
            elif finish:
                spans = rows.spans[row] or [(0, version)]
                top = rows.likeliest[row]
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
        self, done: Future[float], policy: int, version: int, load: Callable[[], None], keep: bool
    ) -> None:
        if not done.set_running_or_notify_cancel():  # cancelled
            return
        started = time.perf_counter()
        try:
            load()
        except RuntimeError as error:
            done.set_exception(error)
            return
        if self.policies.get(policy) is None:  # an adapter leaves the model's weights alone
            packed.forget(self.model)
            if self.inputs:
                self.inputs.changed()
        self.rows.change_version(policy, self.versions[policy], version, keep=keep)
        self.versions[policy] = version
        done.set_result(time.perf_counter() - started)

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
