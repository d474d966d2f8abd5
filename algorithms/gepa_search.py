"""GEPA (arXiv 2507.19457), by the package `gepa`: reflection on traces, a Pareto front of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gepa
from gepa.core.adapter import EvaluationBatch
from gepa.strategies.proposal_sampling import SingleMutationSampling

from agentrl.algorithms.prompt_search import Search, TaskResult, Texts, as_text
from agentrl.core.config.learning import MINIBATCH


def gepa_search(search: Search) -> None:
    """Search until SearchEnd or an error of the reflector is raised."""
    adapter = _Adapter(search)
    gepa.optimize(
        seed_candidate=search.seed_texts,
        trainset=list(range(search.train)),
        valset=list(search.validation),
        adapter=adapter,
        reflection_minibatch_size=MINIBATCH,
        batch_sampler="epoch_shuffled",
        perfect_score=search.config.perfect_score,
        module_selector="round_robin",
        sampling_strategy=SingleMutationSampling(),
        stop_callbacks=[lambda _: adapter.raised is not None],
        callbacks=[adapter],
        logger=adapter,
        track_best_outputs=False,
        seed=search.random_seed,
    )
    if adapter.raised is not None:
        raise adapter.raised


class _Adapter:
    """The adapter, callback and logger of the package. The package retries proposals
    that raise, so the error is kept and ends the search."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.raised: Exception | None = None
        self._parents: dict[tuple[str, tuple[int, ...]], list[TaskResult]] = {}

    def evaluate(
        self, batch: list[int], candidate: Texts, capture_traces: bool = False
    ) -> EvaluationBatch[Any, Any]:
        (rows,) = self.search.evaluate([(candidate, batch)], traces=capture_traces)
        return _batch(rows)

    def batch_evaluate(
        self, items: list[tuple[Texts, list[int]]]
    ) -> list[EvaluationBatch[Any, Any]]:
        """Evaluate several candidates. One that equals its parent is not rolled out again."""
        keys = [(self.search.candidate(texts).id, tuple(tasks)) for texts, tasks in items]
        new = {k: x for k, x in zip(keys, items, strict=True) if k not in self._parents}
        if new:
            played = self.search.evaluate(list(new.values()), traces=True)
            self._parents |= dict(zip(new, played, strict=True))
        return [_batch(self._parents[key]) for key in keys]

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: EvaluationBatch[Any, Any], components: list[str]
    ) -> dict[str, list[dict[str, str]]]:
        rows = eval_batch.trajectories or []
        return {component: [{"shown": as_text(rows, component)}] for component in components}

    def propose_new_texts(
        self,
        candidate: Texts,
        reflective_dataset: Mapping[str, Sequence[Mapping[str, str]]],
        components_to_update: list[str],
    ) -> Texts:
        if self.raised is not None:
            raise self.raised
        try:
            for name in components_to_update:
                (example,) = reflective_dataset[name]
                candidate = self.search.propose(candidate, name, example["shown"])
        except Exception as error:
            self.raised = error
            raise
        return {name: candidate[name] for name in components_to_update}

    def on_evaluation_end(self, event: Mapping[str, Any]) -> None:
        name = "minibatch_before" if event["has_trajectories"] else "minibatch_after"
        self.search.note(**{name: sum(event["scores"]) / len(event["scores"])})

    def on_iteration_end(self, event: Mapping[str, Any]) -> None:
        self._parents.clear()
        self.search.note(accepted=float(event["proposal_accepted"]))
        self.search.end_iteration()

    def log(self, *messages: object, **options: object) -> None:
        pass


def _batch(rows: list[TaskResult]) -> EvaluationBatch[Any, Any]:
    scores = [row.score for row in rows]
    return EvaluationBatch(outputs=scores, scores=scores, trajectories=rows)
