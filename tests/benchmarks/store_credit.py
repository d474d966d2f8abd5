"""Credit of 1 M tokens in 20,000 calls, stored with its step.

Ledger: from tensors to records, on one core. Commit: from records to their commit, with which the
other writers of the store wait. Bytes: what the file grows by, over tokens. `broadcast` is credit
that is the same for all tokens of a call, `per_token` is not. Baseline: one step without credit.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from agentrl.algorithms.credit.dump import CreditRecorder
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.core.types import Credit, NewRollout, Outcome, StepCommit, Transition, float32, int32
from agentrl.store import Store, open_store
from tests.benchmarks.credit import batch
from tests.benchmarks.store import Figures

ROLLOUTS, CALLS = 2000, 10  # calls of one rollout
TOKENS = 50  # of a call


def measure(quick: bool) -> Figures:
    rollouts = ROLLOUTS // 50 if quick else ROLLOUTS
    figures = ledger(rollouts)
    base, size = asyncio.run(committed(rollouts, []))
    figures["commit_without_seconds"] = base
    for name, n in (("broadcast", 1), ("per_token", TOKENS)):
        numbers = float32([0.5 + i for i in range(n)])
        seconds, more = asyncio.run(committed(rollouts, [numbers]))
        figures[f"commit_{name}_seconds"] = seconds
        figures[f"bytes_per_token_{name}"] = (more - size) / (rollouts * CALLS * TOKENS)
    return figures


def ledger(rollouts: int) -> Figures:
    data = batch(rollouts * CALLS)
    algo = make("grpo", {})
    terms = objective.loss_terms(algo, data, GivenLogProbs(), fresh=True)
    drawn = torch.randn(data.n_tokens, generator=torch.Generator().manual_seed(0)).double()
    figures: Figures = {"tokens": data.n_tokens}
    for name, weight in (("broadcast", terms.weight), ("per_token", terms.weight * drawn.abs())):
        started = time.process_time()
        book = CreditRecorder()
        book.open(algo, data)
        book.record(algo, data, replace(terms, weight=weight), data.sampler_logprobs)
        figures[f"ledger_{name}_cpu_seconds"] = time.process_time() - started
    return figures


async def committed(rollouts: int, numbers: list[object]) -> tuple[float, int]:
    """Seconds of a commit and bytes of the file after it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store.db")
        async with open_store(str(path)) as store:
            await store.open_run("r", {})
            calls = await filled(store, rollouts)
            groups = await store.claim_groups("r", 1, 1)
            credits = [entry(call, *numbers) for call in calls] if numbers else []
            commit = StepCommit(
                run="r", epoch=1, step=0, groups=[groups[0].id], versions={}, checkpoint="c",
                metrics={}, credits=credits,
            )  # fmt: skip
            started = time.monotonic()
            await store.commit_step(commit)
            seconds = time.monotonic() - started
            await store.vacuum()
        return seconds, path.stat().st_size


async def filled(store: Store, rollouts: int) -> list[str]:
    new = [NewRollout(id=f"{i:06d}", run="r", group="g", index=i, task={}) for i in range(rollouts)]
    await store.enqueue(new)
    calls = []
    for attempt in await store.claim(rollouts, runner="w", lease=600):
        made = [
            Transition(
                id=f"{attempt.id[:24]}{i:08x}", attempt=attempt.id, index=i, prompt=int32([i]),
                completion=int32(range(TOKENS)), logprobs=float32([-1.0] * TOKENS),
            )
            for i in range(CALLS)
        ]  # fmt: skip
        await store.add_transitions(made)
        await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence)])
        calls += [call.id for call in made]
    return calls


def entry(call: str, numbers: object) -> Credit:
    named = dict.fromkeys(("advantage", "gate", "weight", "psi"), numbers)
    return Credit(transition=call, policy="policy", baseline=float32([0.5]), **named)
