"""One update of a 21 M parameter model on agent traffic, batched in four ways.

per-call: every call is a row. last-call: a call continues the row of the call just before it, or
starts a row (Agent Lightning 1.0). rows: calls merged by exact prefix. trie: rows that share a
prefix share its computation. The first three are given the same implementation, the faster one of
flat without padding and sorted by length with padding; all leave out what predicts nothing.
Seconds are CPU seconds of one thread, so that other work on the machine does not count.

python -m tests.benchmarks.batching --json
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.data.merge import merge
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.packing import Packing, pack_rows
from agentrl.core.types import Transition, float32, int32
from tests.benchmarks.report import arguments, report

SCALE = 25  # lengths are so many times shorter than at real sizes
GROUP = 8
VOCABULARY = 8192
BUDGET = 4096
ENOUGH = 15.0  # seconds of a scheme after which it is not measured again

Forward = Callable[[Qwen2ForCausalLM, Sequence[TokenRow]], Iterator[tuple[Tensor, int]]]
TARGETS = {("A", "rows"): 0.85, ("C", "last-call"): 0.40, ("B", "per-call"): 0.15}


class Traffic:
    """Calls with random tokens, in the proportion of a 1,500-token prompt, actions of 150 tokens
    and observations of 250."""

    def __init__(self, scale: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.prompt, self.action, self.observation = (round(n / scale) for n in (1500, 150, 250))

    def tokens(self, n: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(n)]

    def call(self, prompt: list[int]) -> Transition:
        return Transition(
            id="", attempt="", index=0, prompt=int32(prompt),
            completion=int32(self.tokens(self.action)), logprobs=float32([-9.0] * self.action),
        )  # fmt: skip

    def linear(self, prompt: list[int], turns: int) -> Iterator[Transition]:
        """Each call continues the one before it."""
        for _ in range(turns):
            yield (call := self.call(prompt))
            prompt = [*call.prompt, *call.completion, *self.tokens(self.observation)]

    def agents(self, prompt: list[int], system: list[int], turns: int) -> Iterator[Transition]:
        """After each call of the main agent its sub-agent makes four, with what was just written
        behind its own system prompt."""
        for call in self.linear(prompt, turns):
            yield call
            yield from self.linear([*system, *call.completion], 4)

    def best_of(self, prompt: list[int], turns: int) -> Iterator[Transition]:
        """Four samples of each turn, one of which goes on."""
        for _ in range(turns):
            yield from (calls := [self.call(prompt) for _ in range(4)])
            chosen = self.random.choice(calls)
            prompt = [*chosen.prompt, *chosen.completion, *self.tokens(self.observation)]


def workloads(scale: float = SCALE) -> dict[str, list[list[Transition]]]:
    """Calls of each rollout of one group, in the order they were made."""
    make = Traffic(scale, seed=0)
    prompt, system = make.tokens(make.prompt), make.tokens(make.prompt - make.action)
    kinds: dict[str, Callable[[], Iterator[Transition]]] = {
        "A": lambda: make.linear(prompt, 10),
        "B": lambda: make.linear(prompt, 30),
        "C": lambda: make.agents(prompt, system, 10),
        "D": lambda: make.best_of(prompt, 5),
    }
    return {name: [list(kind()) for _ in range(GROUP)] for name, kind in kinds.items()}


# -- batching --------------------------------------------------------------------------------------


def runs(calls: list[Transition]) -> list[list[Transition]]:
    """Neighbours each of which continues the one before it."""
    found: list[list[Transition]] = []
    for call in calls:
        before = found[-1][-1] if found else call
        if call.prompt.tobytes().startswith(before.prompt.tobytes() + before.completion.tobytes()):
            found[-1].append(call)
        else:
            found.append([call])
    return found


MERGES: dict[str, Callable[[list[Transition]], list[TokenRow]]] = {
    "per-call": lambda calls: [row for call in calls for row in merge([call])],
    "last-call": lambda calls: [row for run in runs(calls) for row in merge(run)],
    "rows": merge,
    "trie": merge,
}


def packed(packing: Packing) -> Forward:
    """Log-probs as the package computes them."""

    def forward(model: Qwen2ForCausalLM, rows: Sequence[TokenRow]) -> Iterator[tuple[Tensor, int]]:
        for pack in pack_rows(rows, packing, BUDGET):
            yield forward_logprobs(model, pack), len(pack.tokens)

    return forward


def padded(model: Qwen2ForCausalLM, rows: Sequence[TokenRow]) -> Iterator[tuple[Tensor, int]]:
    """Log-probs from right-padded batches of similar length."""
    rows = sorted(rows, key=lambda row: int(row.actions[-1]))
    while rows:
        size, longest = 1, int(rows[0].actions[-1])
        while size < len(rows) and (size + 1) * int(rows[size].actions[-1]) <= BUDGET:
            size, longest = size + 1, int(rows[size].actions[-1])
        micro, rows = rows[:size], rows[size:]
        tokens = pad_sequence([row.tokens[: int(row.actions[-1])] for row in micro], True)
        states = torch.cat([row.actions - 1 + i * longest for i, row in enumerate(micro)])
        actions = torch.cat([row.tokens[row.actions] for row in micro])
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        yield (
            -cross_entropy(model.lm_head(hidden[states]), actions, reduction="none"),
            size * longest,
        )


# -- measurement -----------------------------------------------------------------------------------


def network() -> Qwen2ForCausalLM:
    """21 M parameters, 17 M of them in linear layers."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def update(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    forward: Forward,
    rows: list[TokenRow],
) -> tuple[float, int]:
    """Seconds of one forward, backward and optimizer step; tokens forwarded, with padding."""
    started, tokens = time.process_time(), 0
    weight = 1 / sum(len(row.actions) for row in rows)
    for logprobs, forwarded in forward(model, rows):
        torch.autograd.backward(logprobs, torch.full_like(logprobs, -weight))
        tokens += forwarded
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - started, tokens


def distinct(rows: Sequence[TokenRow]) -> int:
    """(prefix, token) pairs that an action has before it."""
    return len(
        {
            tokens[: n + 1].tobytes()
            for row in rows
            for tokens in (row.tokens[: int(row.actions[-1])].numpy(),)
            for n in range(len(tokens))
        }
    )


def measure(name: str, group: list[list[Transition]], repeats: int) -> dict[str, float]:
    """Every scheme of one workload, in turns; the best time of each."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = {scheme: [row for calls in group for row in m(calls)] for scheme, m in MERGES.items()}
    forward: dict[str, Forward] = {"trie": packed("trie")}
    for scheme in ("per-call", "last-call", "rows"):
        sample = MERGES[scheme](group[0])
        forward[scheme] = min(
            (packed("rows"), padded), key=lambda f: update(model, optimizer, f, sample)[0]
        )
    times: dict[str, list[float]] = {scheme: [] for scheme in MERGES}
    tokens = {}
    for _ in range(repeats):
        for scheme, found in times.items():
            if sum(found) < ENOUGH:
                seconds, tokens[scheme] = update(model, optimizer, forward[scheme], rows[scheme])
                found.append(seconds)
    best = {scheme: min(found) for scheme, found in times.items()}
    figures: dict[str, float] = {f"{name} distinct tokens": distinct(rows["rows"])}
    for scheme, seconds in best.items():
        figures[f"{name} {scheme} tokens"] = tokens[scheme]
        figures[f"{name} {scheme} seconds"] = seconds
        if scheme != "trie":
            figures[f"{name} trie / {scheme}"] = best["trie"] / seconds
        if (name, scheme) in TARGETS:
            figures[f"{name} trie / {scheme}, at most"] = TARGETS[name, scheme]
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices="ABCD", help="one workload")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, float] = {}
    for name, group in workloads().items():
        if options.only in (None, name):
            result |= measure(name, group, options.repeats)
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
