"""Learners of packages for an earlier version, in today's form. Goes with the next version."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from agentrl.algorithms.learners.base import LearnerDefaults
from agentrl.algorithms.objective.ratios import LETTERS
from agentrl.plugins import where

log = logging.getLogger("agentrl.algorithm")


SUPPLIES = LETTERS | {"v": "values", "k": "top_tokens", "e": "entropy"}
MODELS = {"current": "o", "reference": "q", "teacher": "t"}


def current_form(learner: Any, *, by: object) -> Any:
    """The learner with what it lacks of `LearnerDefaults`, and with the names of today for what it
    supplies. by: the function that returned it."""
    lacking = [
        name
        for name in vars(LearnerDefaults)
        if not name.startswith("_") and not hasattr(learner, name)
    ]
    defaults = LearnerDefaults()
    with suppress(AttributeError):  # `check_protocol` names what cannot be added
        for name in lacking:
            setattr(learner, name, getattr(defaults, name))
        if lacking:
            log.warning(
                "The learner of %s has no %s, which learners have now; derive its class from "
                "agentrl.algorithms.learners.base.LearnerDefaults, which has them.",
                where(by), ", ".join(lacking),
            )  # fmt: skip
    supplies = getattr(learner, "supplies", ())
    if any(letter in SUPPLIES for letter in supplies):
        _renamed(learner, supplies)
        names = ", ".join(f"{old!r} is {SUPPLIES.get(old, old)!r}" for old in sorted(supplies))
        log.warning(
            "The learner of %s names what it supplies by letters: %s now, as is the model that "
            "`logprobs` is asked for.",
            where(by), names,
        )  # fmt: skip
    accepted = inspect.signature(getattr(learner, "step", current_form)).parameters
    if "eta" in accepted and "entropy_weights" not in accepted:
        learner.step = partial(_with_eta, learner.step)
        log.warning(
            "In `step`, the learner of %s calls `entropy_weights` eta; rename it.", where(by)
        )
    return learner


def _with_eta(
    step: Callable[..., Any], *given: Any, entropy_weights: Any = None, **named: Any
) -> Any:
    return step(*given, eta=entropy_weights, **named)


def _renamed(learner: Any, supplies: Iterable[str]) -> None:
    """Let the learner's methods be called with today's names of models."""
    learner.supplies = frozenset(SUPPLIES.get(name, name) for name in supplies)
    for verb in ("logprobs", "top", "symbol_logprobs"):
        if method := getattr(learner, verb, None):
            setattr(learner, verb, partial(_by_letter, method))


def _by_letter(method: Callable[..., Any], *given: Any, **named: Any) -> Any:
    def old(x: Any) -> Any:
        return MODELS.get(x, x) if isinstance(x, str) else x

    return method(*map(old, given), **{key: old(x) for key, x in named.items()})
