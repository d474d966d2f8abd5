"""The same run file trained twice: the seed decides every token, and so every weight."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from agentrl.store import open_store
from tests import warm

SMALL = ["steps=3", "algorithm.groups=2", "algorithm.group_size=4", "sampling.max_tokens=24"]
Calls = dict[tuple[str, int], tuple[list[int], list[float]]]


def trained(folder: Path, *settings: str) -> tuple[Calls, dict[str, torch.Tensor]]:
    """Tokens and log-probs of every call by rollout, and the weights at the end."""
    command = ["-m", "agentrl", "train", "run.toml", *SMALL, *settings]
    assert (run := warm.run(*command, cwd=folder)).returncode == 0, run.stderr

    async def read() -> tuple[Calls, str]:
        async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
            found: Calls = {}
            for rollout in await store.rollouts("tiny"):
                trace = await store.trace(rollout.id)
                assert trace is not None
                for call in trace.transitions:
                    key = rollout.id, call.index
                    found[key] = call.completion.tolist(), call.logprobs.tolist()
            state = await store.run("tiny")
            assert state is not None
            assert state.checkpoint is not None
            return found, state.checkpoint

    calls, checkpoint = asyncio.run(read())
    return calls, load_file(folder / "out" / checkpoint / "model.safetensors")


def test_the_same_run_file_twice_ends_bitwise_the_same(run_folder: Path) -> None:
    again = run_folder.with_name("again")
    other = run_folder.with_name("other")
    for folder in (again, other):
        shutil.copytree(run_folder, folder)
    # Other calls share the batches, and prefixes are cached or not.
    (calls, weights), (repeated, same) = trained(run_folder), trained(again, "runner.concurrency=3")
    assert len(calls) > 24
    assert {key: tokens for key, (tokens, _) in calls.items()} == {
        key: tokens for key, (tokens, _) in repeated.items()
    }
    assert calls == repeated
    assert not [name for name, tensor in weights.items() if not torch.equal(tensor, same[name])]
    assert trained(other, "seed=1")[0] != calls
