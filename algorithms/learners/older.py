"""Learners of packages for an earlier version, in today's form. Goes with the next version."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from agentrl.algorithms.learners.base import LearnerDefaults
from agentrl.plugins import where

log = logging.getLogger("agentrl.algorithm")


def current_form(learner: Any, *, by: object) -> Any:
    """The learner with what it lacks of `LearnerDefaults`. by: the function that returned it."""
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
    return learner
