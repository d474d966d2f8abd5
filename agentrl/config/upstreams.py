"""Checks of the other users of `[upstreams]` besides agents: teachers."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.schema import RunConfig
from agentrl.errors import nearest


def teacher_problems(config: RunConfig) -> Iterator[str]:
    """Error messages about [teacher], of the run or of the view of one of its policies."""
    name, known = config.teacher.upstream, config.endpoints
    if name and name not in known:
        yield f"teacher.upstream = {name!r}; {nearest(name, known)}"
    if name and config.sampling.temperature not in (0, 1):
        yield "sampling.temperature: teacher.upstream returns log-probs at 1; set it to 1"
