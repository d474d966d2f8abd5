"""The rows of the key-value pool: which tokens each holds, for which call.

Owns the bookkeeping in columns, one entry per row. Rows [0, n) run, in one block so that attention
reads them without a gather; rows [limit, size) are idle and remember finished calls. Always true:
the keys of `tokens[row, :length[row]]` are in the pool, and a running row knows more tokens than
that. Written by the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.algorithms.engines.embedded.kv_cache import KVPool
from agentrl.types import Sampling


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """New tokens of a call, with their log-probs. `finish` is set on the last one.

    finish: stop (end of sequence, or `stop` said so), length, cancelled, or error with a sentence.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A prompt to complete. Identity is what counts: two equal calls are two calls."""

    prompt: NDArray[np.int32]
    sampling: Sampling
    seed: int  # 0 <= seed < 2**64
    receive: Callable[[TokenUpdate], None]  # called where the engine's `deliver` says
    stream: bool = False  # an update per token instead of one at the end
    policy: int = 0  # number of the one that answers
    stop: Callable[[int], bool] | None = None  # told every token; true ends the call


class RowTable:
    """`limit` rows that may run at once and `idle` ones, of `context` tokens each."""

    def __init__(self, limit: int, idle: int, context: int) -> None:
        size = limit + idle
        self.limit = limit
        self.n = 0
        self.calls: list[GenerationRequest] = []
        self.tokens = np.zeros((size, context), np.int32)
        self.length = np.zeros(size, np.int64)  # tokens whose keys are in the pool
        self.known = np.zeros(size, np.int64)  # tokens of prompt and completion
        self.policy = np.zeros(size, np.int64)  # number of the one the keys were computed with
        self.used = np.zeros(size, np.int64)  # clock of the last use of an idle row
        self.clock = 0
        self.prompt = np.zeros(limit, np.int64)  # tokens of the prompt
        self.end = np.zeros(limit, np.int64)  # `known` at which the completion is cut
        self.watched = np.zeros(limit, np.bool_)  # wants to see every token
        self.seed = np.zeros(limit, np.uint64)
        self.temperature = np.zeros(limit)
        self.top_p = np.zeros(limit)
        self.top_k = np.zeros(limit, np.int64)
        self.logprobs = np.zeros((limit, context), np.float32)
        self._columns = (
            self.length, self.known, self.policy, self.prompt, self.end, self.watched,
            self.seed, self.temperature, self.top_p, self.top_k,
        )  # fmt: skip

    def shared(self, tokens: NDArray[np.int32], policy: int) -> NDArray[np.int64]:
        """Length of the common prefix of `tokens` with what every row knows, int64 [rows]; 0 for
        rows of another policy."""
        different = self.tokens[:, : len(tokens)] != tokens
        first = different.argmax(axis=1)
        first[~different[np.arange(len(first)), first]] = len(tokens)
        shared: NDArray[np.int64] = np.minimum(first, self.known) * (self.policy == policy)
        return shared

    def source(self, prompt: NDArray[np.int32], policy: int) -> tuple[int, int, int]:
        """Row of the policy that holds the longest prefix of a prompt, how long it is, and how long
        one will be once the running rows are through their prompts. Its last token must always be
        fed."""
        if len(prompt) == 1:
            return 0, 0, 0
        shared = self.shared(prompt[:-1], policy)
        ready = np.minimum(shared, self.length)
        row = int(ready.argmax())
        return row, int(ready[row]), int(shared.max())

    def add(self, call: GenerationRequest, pool: KVPool, source: int, shared: int) -> None:
        """Start a call in the next running row, with the first `shared` keys of row `source`."""
        row, sampling, size = self.n, call.sampling, len(call.prompt)
        if shared:
            self.clock += 1
            self.used[source] = self.clock
            pool.copy(source, row, shared)
        self.tokens[row, :size] = call.prompt
        self.length[row], self.known[row], self.prompt[row] = shared, size, size
        self.policy[row] = call.policy
        context = self.tokens.shape[1]
        room = context - size
        self.end[row] = size + min(room, sampling.max_tokens or room)
        self.watched[row] = call.stream or call.stop is not None
        self.seed[row] = call.seed
        self.temperature[row] = sampling.temperature
        self.top_p[row], self.top_k[row] = sampling.top_p, sampling.top_k
        self.calls.append(call)
        self.n += 1

    def completion(self, row: int) -> tuple[list[int], list[float]]:
        """Sampled tokens of a running row and their log-probs."""
        span = slice(self.prompt[row], self.known[row])
        return self.tokens[row, span].tolist(), self.logprobs[row, span].tolist()

    def remove(self, row: int, pool: KVPool, *, keep: bool = True) -> None:
        """End a running row; the last running row takes its place. `keep` remembers its keys."""
        if keep:
            self._remember(row, pool)
        self.n -= 1
        last = self.n
        if row != last:
            pool.copy(last, row, int(self.length[last]))
            known = self.known[last]
            self.tokens[row, :known] = self.tokens[last, :known]
            self.logprobs[row, :known] = self.logprobs[last, :known]
            for column in self._columns:
                column[row] = column[last]
            self.calls[row] = self.calls[last]
        self.calls.pop()
        self.length[last] = self.known[last] = 0

    def forget(self, policy: int | None = None) -> None:
        """Drop what idle rows hold, of one policy or all: it was computed with other weights."""
        gone = np.arange(len(self.policy)) >= self.limit
        if policy is not None:
            gone &= self.policy == policy
        self.length[gone] = self.known[gone] = self.used[gone] = 0

    def _remember(self, row: int, pool: KVPool) -> None:
        length, policy = int(self.length[row]), int(self.policy[row])
        idle = slice(self.limit, None)
        # A row that says no more than the new one goes first, else the one unused for longest.
        within = self.shared(self.tokens[row, :length], policy)[idle] >= self.known[idle]
        target = self.limit + int(np.where(within, -1, self.used[idle]).argmin())
        pool.copy(row, target, length)
        self.tokens[target, :length] = self.tokens[row, :length]
        self.length[target] = self.known[target] = length
        self.policy[target] = policy
        self.clock += 1
        self.used[target] = self.clock
