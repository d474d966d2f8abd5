"""The pages of a search for prompts: its candidates, and the texts of one."""

from __future__ import annotations

from typing import Any

from agentrl.algorithms.prompts.records import Candidate, candidates_of, reflections_of
from agentrl.errors import NotFound
from agentrl.store.base import Store
from agentrl.store.records import GroupRow
from agentrl.types import Purpose, RunState
from agentrl.view.records import changes, nested

SHOWN_GROUPS = 500  # last groups of searches whose scores are shown
Values = dict[str, Any]


async def searched(store: Store, run: str) -> Values:
    """The candidates of the run's searches, each below its parent."""
    state, known = await _candidates(store, run)
    rows = nested([*known.values()], lambda one: next(iter(one.parents), ""))
    return {"run": run, "rows": rows, "known": known} | await _found(store, state)


async def compared(store: Store, run: str, id: str) -> Values:
    """The texts of a candidate as a diff against its parent's."""
    state, known = await _candidates(store, run)
    if (one := known.get(id)) is None:
        raise NotFound(f"run {run!r} has no candidate {id!r}")
    parent = known.get(next(iter(one.parents), ""), one)
    pairs = zip(parent.texts, one.texts, strict=False)
    texts = [(new, changes(old.text, new.text)) for old, new in pairs]
    asked = [row for row in await reflections_of(store, run) if row.id == one.reflection]
    values = {"run": run, "one": one, "parent": parent, "texts": texts, "asked": asked}
    return values | await _found(store, state)


async def _candidates(store: Store, run: str) -> tuple[RunState, dict[str, Candidate]]:
    if (state := await store.run(run)) is None:
        raise NotFound(f"there is no run {run!r} in this store")
    return state, {one.id: one for one in await candidates_of(store, run)}


async def _found(store: Store, state: RunState) -> Values:
    """(candidate, kind) -> the groups with which searches scored candidates."""
    prefix, settings = f"{state.run}/prompts/", state.config.get("prompts") or {}
    given: Any = {"purpose": Purpose.EVAL, "before": f"{state.run}/prompts0"}
    found: dict[tuple[str, str], list[GroupRow]] = {}
    for group in await store.groups(state.run, limit=SHOWN_GROUPS, **given):
        if group.id.startswith(prefix):
            search, _, name = group.id.removeprefix(prefix).partition("/")
            kind = "validation" if group.n == settings.get("validation") else "minibatch"
            key = (name.rpartition(".")[2], search if search == "heldout" else kind)
            found.setdefault(key, []).append(group)
    return {"found": found}
