"""Automatic prompt optimisation with textual gradients and beam search (ProTeGi, arXiv 2305.03495),
with the budget of Agent Lightning's APO: two parents, two children each, a few tasks a round."""

from __future__ import annotations

import random
from itertools import cycle, islice
from statistics import fmean

from agentrl.algorithms.prompts.search import Search, Texts, as_text

BEAM_WIDTH = 2  # candidates that survive a round
CHILDREN = 2  # children of each
ROUND_SHARE = 2 / 3  # fraction of the validation tasks on which a round compares candidates
CRITIQUE = """An assistant was given these instructions:

{text}

With them it read and said this in some tasks, with these faults:

{examples}

Say in a few sentences what the instructions lack or have wrong, so that these faults arose."""


def apo_search(search: Search) -> None:
    """Search until SearchEnd is raised."""
    rng = random.Random(search.random_seed)
    beam = [search.seed_texts]
    search.evaluate([(beam[0], search.validation)])
    components = cycle(search.seed_texts)
    while True:
        parents = [beam[i % len(beam)] for i in range(BEAM_WIDTH) for _ in range(CHILDREN)]
        children = [_child(search, texts, next(components), rng) for texts in parents]
        beam = _best(search, [*beam, *children], rng)
        if search.candidate(beam[0]).id not in search.scores:
            search.evaluate([(beam[0], search.validation)])
        search.end_iteration()


def _child(search: Search, texts: Texts, component: str, rng: random.Random) -> Texts:
    """Edit one component by a critique of some rollouts: the critique is the gradient, the edit the
    step."""
    tasks = rng.sample(range(search.train), min(search.config.minibatch, search.train))
    (rows,) = search.evaluate([(texts, tasks)], traces=True)
    shown = as_text(rows, component)
    gradient = search.ask(CRITIQUE.format(text=texts[component], examples=shown)).answer
    return search.propose(texts, component, gradient, "Correct that.")


def _best(search: Search, pool: list[Texts], rng: random.Random) -> list[Texts]:
    """The best BEAM of a pool on a sample of the validation tasks, evaluated at the same time."""
    unique = list({search.candidate(texts).id: texts for texts in pool}.values())
    tasks = rng.sample(search.validation, max(1, int(ROUND_SHARE * len(search.validation))))
    played = search.evaluate([(texts, tasks) for texts in unique])
    means = [fmean(row.score for row in rows) for rows in played]
    ranked = sorted(range(len(unique)), key=lambda i: -means[i])
    return [unique[i] for i in islice(ranked, BEAM_WIDTH)]
