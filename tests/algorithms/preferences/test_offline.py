"""Runs on a data set: through the loop, without an agent, a server or a reference in memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.algorithms.preferences.collector import step_items
from agentrl.algorithms.preferences.draft import pin_dataset
from agentrl.algorithms.train import main, stages
from agentrl.algorithms.train.stages import load_algorithm
from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import Transition, int32
from agentrl.store import open_store
from agentrl.store.records import Item, Side, digest_of
from tests import factories


def settings(folder: Path, model: Path, **more: Any) -> RunConfig:
    data = {
        "name": "offline", "output": str(folder / "run"), "steps": 4,
        "store": f"sqlite:///{folder / 'store.db'}",
        "policy": {"model": str(model), "device": "cpu"},
        "data": {"name": "pairs@1"},
        "algorithm": {"preset": "dpo", "groups": 3, "lr": 1e-2},
        "learner": {"kind": "torch", "threads": 1},
        "keep_checkpoints": 9,
    }  # fmt: skip
    return resolve({**data, **more}, source="test")


def side(dice: torch.Generator, prompt: list[int], size: int, policy: str = "policy") -> Side:
    said = torch.randint(3, 500, (size,), generator=dice).tolist()
    call = factories.call(f"c{len(prompt)}{said}", prompt, said, policy=policy)
    return Side(digest=digest_of([call]), own=[call])


async def fill(url: str, kind: str = "pair", count: int = 7, policy: str = "policy") -> list[Side]:
    """A data set of `count` items to train on, and two held out."""
    dice = torch.Generator().manual_seed(0)
    sides = [side(dice, [5 + i // 2, 6, 7], 2 + i % 3, policy) for i in range(2 * (count + 2))]
    items = []
    for k in range(count + 2):
        own: dict[str, Any] = {"rejected": sides[2 * k + 1].digest}
        if kind == "label":
            own = {"label": float(k % 2)}
        split = "train" if k < count else "test"
        items.append(Item(position=k, kind=kind, chosen=sides[2 * k].digest, split=split, **own))
    async with open_store(url) as store:
        version = await store.draft_dataset("pairs", {})
        await store.add_items("pairs", version, items, sides)
        await store.commit_dataset("pairs", version)
    return sides


def weights(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    (path,) = Path(config.output, "checkpoints").glob(f"{step:06}*")
    return load_file(path / "model.safetensors")


async def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path, tiny_llama_dir, monkeypatch):
    loaded = []
    real = stages.factory.load_auxiliary
    monkeypatch.setattr(
        stages.factory, "load_auxiliary", lambda *a, **k: loaded.append(a) or real(*a, **k)
    )
    whole, parts = (settings(tmp_path / name, tiny_llama_dir) for name in ("whole", "parts"))
    for config in (whole, parts):
        await fill(config.store)
    await main.run(whole)
    await main.run(settings(tmp_path / "parts", tiny_llama_dir, steps=2))
    await main.run(parts)
    assert not loaded
    ours, theirs = weights(whole, 4), weights(parts, 4)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    async with open_store(whole.store) as store:
        rows = await store.steps("offline")
        assert [row.committed for row in rows] == [True] * 4 + [False]
        counts = await store.counts("offline")
        assert counts.groups_trained == counts.succeeded == 0
    assert rows[0].metrics["logps/chosen_drop"] == pytest.approx(0, abs=1e-4)
    assert rows[0].metrics["preferences/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[-1].metrics["eval/preferences/pairs"] == 2
    assert rows[3].metrics["preferences/loss"] < 0.6
    assert rows[3].metrics["data/epochs"] == pytest.approx(12 / 7)


async def test_kto_caches_the_reference_of_other_prompts_too(tmp_path, tiny_llama_dir):
    config = settings(
        tmp_path, tiny_llama_dir, steps=2, algorithm={"preset": "kto", "groups": 7, "lr": 1e-2}
    )
    sides = await fill(config.store, "label", policy="policy@3")  # of a live run
    await main.run(config)
    async with open_store(config.store) as store:
        (last,) = [row.metrics for row in await store.steps("offline") if row.step == 1]
        assert (await store.stats()).rows["logprobs"] == 2 * (7 + 2)
    assert last["preferences/labels"] == 7
    assert last["rewards/chosen"] > last["rewards/rejected"]
    assert sides


async def test_what_cannot_be_trained_whole_is_left_out_and_counted(
    tmp_path, tiny_llama_dir, caplog
):
    config = settings(tmp_path, tiny_llama_dir, steps=0)
    dice = torch.Generator().manual_seed(1)
    long, foreign = side(dice, [5] * 3000, 3), side(dice, [5, 6], 2)
    foreign = Side(digest="f", own=[_with_token(foreign.own[0], 9999)])
    text = factories.call(
        "t", (), (), exact=False, messages=[], answer={"role": "assistant", "content": "a"}
    )
    unknown = Side(digest="u", own=[text])
    good, other = side(dice, [5, 6], 2), side(dice, [5, 6], 3)
    bad = [long, foreign, unknown]
    async with open_store(config.store) as store:
        await store.draft_dataset("pairs", {})
        items = [
            Item(position=i, kind="pair", chosen=good.digest, rejected=one.digest)
            for i, one in enumerate([*bad, other])
        ]
        await store.add_items("pairs", 1, items, [good, other, *bad])
        await store.commit_dataset("pairs", 1)
    with caplog.at_level(logging.WARNING):
        await main.run(config)
    assert "3 items of split 'train' are left out" in caplog.text
    for why in ("longer than the", "another tokenizer", "chat template does not render"):
        assert why in caplog.text


def _with_token(call: Transition, token: int) -> Transition:
    from msgspec.structs import replace

    return replace(call, prompt=int32([token, 5]))


async def test_items_of_another_kind_are_named(tmp_path, tiny_llama_dir):
    config = settings(tmp_path, tiny_llama_dir)
    await fill(config.store, "label")
    with pytest.raises(ConfigError, match=r"has 7 of kind label, and .*learns from items of kind"):
        await main.run(config)


async def test_a_run_keeps_the_version_it_began_with(tmp_path, tiny_llama_dir):
    config = settings(tmp_path, tiny_llama_dir, steps=1, data={"name": "pairs"})
    async with open_store(config.store) as store:
        with pytest.raises(ConfigError, match="no such version"):
            await pin_dataset(store, config)
    await fill(config.store)
    async with open_store(config.store) as store:
        pinned = await pin_dataset(store, config)
    assert pinned.data.version == 1
    await main.run(pinned)
    await fill(config.store, count=3)
    async with open_store(config.store) as store:
        assert (await pin_dataset(store, config)).data.version == 1
        assert [row.version for row in await store.datasets()] == [1, 2]


def test_steps_take_every_item_once_an_epoch() -> None:
    steps = [step_items(7, 3, step, 4) for step in range(7)]
    taken = [item for step in steps for item in step]
    for epoch in range(4):
        assert sorted(taken[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert steps[5] == step_items(7, 3, 5, 4) != step_items(7, 4, 5, 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tasks": {"train": "x.jsonl"}}, r"\[tasks\] has no effect in a run on \[data\]"),
        ({"algorithm": {"preset": "dpo", "group_size": 4}}, "algorithm.group_size has no effect"),
    ],
)
def test_settings_of_rollouts_are_refused(tmp_path, more, message) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, tmp_path, **more)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"preset": "grpo"}, "learns from rewards of rollouts"),
        ({"preset": "dpo", "options": {"reward": "rm"}}, "items of .data. have labels"),
    ],
)
def test_algorithms_of_rollouts_are_refused(tmp_path, algorithm, message) -> None:
    config = settings(tmp_path, tmp_path, algorithm=algorithm)
    with pytest.raises(ConfigError, match=message):
        load_algorithm(config)
