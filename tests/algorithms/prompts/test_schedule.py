"""Prompts and training together: whose texts a step plays with, and what is kept apart by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from agentrl.algorithms import prompts
from agentrl.algorithms.credit.calls import Ema
from agentrl.algorithms.prompt_search import Candidate, candidate_id, candidates_of, put_candidates
from agentrl.algorithms.prompts import PromptSchedule
from agentrl.algorithms.sampling.replays import joining_rollout
from agentrl.algorithms.sampling.tasks import CandidateInUse, TaskSampler
from agentrl.core.config import RunConfig
from agentrl.core.errors import Invalid
from agentrl.core.types import Branch
from agentrl.store import open_store
from tests import factories
from tests.factories import rollout


def config(folder: Path, **prompts: Any) -> RunConfig:
    (folder / "solver.txt").write_text("Be brief.\n")
    table = {"reflector": "teacher", "budget": 100, "components": {"solver": "solver.txt"}}
    tables: Any = {"tasks": {"train": "t.py:t"}, "upstreams": {"teacher": {"text": "x"}}}
    return factories.config(folder, steps=6, prompts=table | prompts, **tables)


async def played(
    settings: RunConfig, monkeypatch: pytest.MonkeyPatch, start: int = 0
) -> tuple[list[str], list[tuple[int, str, int]]]:
    """The text of each step, and the searches: step, text they began with, budget."""
    searches = []

    async def search(
        store: Any, config: RunConfig, state: Any, texts: list[Any], step: int
    ) -> Candidate:
        searches.append((step, texts[0].text, config.prompts.budget))
        new = [replace(texts[0], text=f"after {step}")]
        await store.log(config.name, step, {"prompts/rollouts": 55.0})
        base = {"run": config.name, "step": step, "parents": [], "state": "chosen"}
        return Candidate(id=candidate_id(new), texts=new, **base)  # type: ignore[arg-type]

    monkeypatch.setattr(prompts, "search_prompts", search)
    async with open_store(f"sqlite:///{settings.output}.db") as store:
        state = await store.open_run(settings.name, {})
        for step in range(state.step, start):
            commit = factories.commit(step, run=settings.name, epoch=state.epoch)
            await store.commit_step(commit)
        schedule = PromptSchedule(store, settings, replace(state, step=start))
        await schedule.start()
        texts = []
        for step in range(start, settings.steps):
            await schedule.before_step(step)
            known = {c.id: c.texts[0].text for c in await candidates_of(store, settings.name)}
            texts.append(known[str(schedule.in_use.id)])
    return texts, searches


async def test_alternate_searches_again_from_the_texts_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, schedule=4)
    texts, searches = await played(settings, monkeypatch)
    assert texts == ["after 0"] * 4 + ["after 4"] * 2
    assert searches == [(0, "Be brief.", 100), (4, "after 0", 100)]
    again, repeated = await played(settings, monkeypatch, start=5)
    assert again == ["after 4"]
    assert repeated == [(0, "Be brief.", 55), (4, "after 0", 55)]  # as far as they came


async def test_before_searches_once_and_off_reads_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, searches = await played(config(tmp_path, schedule="before"), monkeypatch)
    assert (texts, [step for step, _, _ in searches]) == (["after 0"] * 6, [0])
    found = tmp_path / "out" / "prompts"
    found.mkdir(parents=True)
    (found / "solver.txt").write_text("Found.\n")
    texts, searches = await played(replace(config(tmp_path), name="other"), monkeypatch)
    assert (texts, searches) == (["Found."] * 6, [])


def test_a_group_has_one_candidate_which_branches_inherit(tmp_path: Path) -> None:
    sampler = TaskSampler(config(tmp_path), [{"input": "x"}], prompts=CandidateInUse("c"))
    asked = sampler.rollouts(0)
    assert {one.candidate for one in asked} == {"c"}
    source = rollout("r", candidate="c")
    branch = joining_rollout(sampler.config, source, Branch(rollout="r", calls=1), {}, 0)
    assert branch.candidate == "c"


async def test_a_group_of_two_candidates_is_refused(tmp_path: Path) -> None:
    sampler = TaskSampler(config(tmp_path), [{"input": "x"}], prompts=CandidateInUse("c"))
    first, second, *_ = sampler.rollouts(0)
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run(sampler.config.name, {})
        base = {"run": sampler.config.name, "step": 0, "parents": [], "texts": []}
        two = [Candidate(id=x, state="chosen", **base) for x in ("c", "d")]  # type: ignore[arg-type]
        await put_candidates(store, sampler.config.name, two)
        with pytest.raises(Invalid, match="candidates"):
            await store.enqueue([first, replace(second, candidate="d")])


def test_a_running_baseline_is_that_of_a_candidate() -> None:
    batch: Any = type("B", (), {"roles": ["a"], "transition_role": torch.tensor([])})()
    rows = [rollout("r", candidate=candidate) for candidate in (None, "c", "d")]
    with pytest.MonkeyPatch.context() as patch:
        owners = torch.tensor([0, 1, 2])
        patch.setattr("agentrl.algorithms.credit.calls.rollout_of", lambda *_: owners)
        names = Ema(at="rollout").names(batch, rows)
    assert names == ["/", "c//", "d//"]
