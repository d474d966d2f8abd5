"""The pages of a search in `agentrl view`, which alone imports this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.algorithms.prompts.records import Candidate, candidates_of, reflections_of
from agentrl.errors import NotFound
from agentrl.store.base import Store
from agentrl.store.records import GroupRow
from agentrl.types import Json, Purpose, RunState

if TYPE_CHECKING:
    from agentrl.view.pages import Page

SHOWN_GROUPS = 500  # last groups of searches whose scores are shown


class SearchPage:
    """/prompts/<run>: the candidates of the run's searches, each below its parent."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def link(self, config: Mapping[str, Json]) -> str:
        return "Prompts" if (config.get("prompts") or {}).get("components") else ""

    async def ids(self, run: str) -> list[str]:
        return [run]

    async def page(self, id: str, query: Mapping[str, str]) -> Page:
        from agentrl.view.pages import Page
        from agentrl.view.records import nested

        state, known = await _candidates(self._store, id)
        rows = nested([*known.values()], lambda one: next(iter(one.parents), ""))
        values = {"run": id, "rows": rows, "known": known}
        return Page("prompts.html", f"{id} prompts", values | await _found(self._store, state))


class CandidatePage:
    """/prompt/<id>?run=<run>: the texts of a candidate as a diff against its parent's."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def link(self, config: Mapping[str, Json]) -> str:
        return ""

    async def ids(self, run: str) -> list[str]:
        return [one.id for one in await candidates_of(self._store, run)]

    async def page(self, id: str, query: Mapping[str, str]) -> Page:
        from agentrl.view.pages import Page
        from agentrl.view.records import changes

        run = query["run"]
        state, known = await _candidates(self._store, run)
        if (one := known.get(id)) is None:
            raise NotFound(f"run {run!r} has no candidate {id!r}")
        parent = known.get(next(iter(one.parents), ""), one)
        pairs = zip(parent.texts, one.texts, strict=False)
        texts = [(new, changes(old.text, new.text)) for old, new in pairs]
        asked = [row for row in await reflections_of(self._store, run) if row.id == one.reflection]
        values = {"run": run, "one": one, "parent": parent, "texts": texts, "asked": asked}
        return Page("prompt.html", f"prompt {id}", values | await _found(self._store, state))


async def _candidates(store: Store, run: str) -> tuple[RunState, dict[str, Candidate]]:
    if (state := await store.run(run)) is None:
        raise NotFound(f"there is no run {run!r} in this store")
    return state, {one.id: one for one in await candidates_of(store, run)}


async def _found(store: Store, state: RunState) -> dict[str, Any]:
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
