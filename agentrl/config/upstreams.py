"""Checks of the other users of `[upstreams]` besides agents: judges and teachers."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.schema import RunConfig
from agentrl.errors import nearest
from agentrl.types import POLICY


def judge_problems(config: RunConfig) -> Iterator[str]:
    """Error messages about [judges]."""
    for name, judge in config.judges.items():
        known = _answering(config) | (set(config.policies) or {POLICY})
        if judge.upstream not in known:
            yield f"judges.{name}.upstream = {judge.upstream!r}; {nearest(judge.upstream, known)}"
        if name in config.reward_models:
            yield f"judges.{name}: [reward_models] has a reward of that name; rename one"


def teacher_problems(config: RunConfig) -> Iterator[str]:
    """Error messages about [teacher], of the run or of the view of one of its policies."""
    name, known = config.teacher.upstream, _answering(config)
    if name and name not in known:
        yield f"teacher.upstream = {name!r}; {nearest(name, known)}"
    if name and config.sampling.temperature not in (0, 1):
        yield "sampling.temperature: teacher.upstream returns log-probs at 1; set it to 1"


def _answering(config: RunConfig) -> set[str]:
    """The upstreams that are endpoints."""
    return {name for name, upstream in config.upstreams.items() if upstream.text is None}
