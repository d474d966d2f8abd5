"""How old the tokens of a training step are."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import fmean

import torch

from agentrl.algorithms.data.merge import token_versions
from agentrl.algorithms.diagnostics.metrics import Metrics, own_calls
from agentrl.types import POLICY, Group


def staleness(
    step: int, groups: Sequence[Group], policy: str = POLICY, *, version: int | None = None
) -> Metrics:
    """How old the data is that step `step` trains on. staleness/steps_mean, steps_max: steps since
    a group was requested. staleness/version_mean, version_p95, version_max: updates of the policy
    since a token was sampled, over tokens whose version is known. staleness/mixed: calls during
    which weights changed. version: of the policy now, default `step`."""
    now = step if version is None else version
    metrics: Metrics = {}
    if ages := [step - group.step for group in groups]:
        metrics |= {"staleness/steps_mean": fmean(ages), "staleness/steps_max": max(ages)}
    calls = [c for c in own_calls(groups, policy) if c.version is not None and c.completion]
    if calls:
        lags = now - torch.cat(list(map(token_versions, calls)))
        metrics["staleness/version_mean"] = float(lags.double().mean())
        metrics["staleness/version_p95"] = float(lags.kthvalue(ceil(0.95 * lags.numel())).values)
        metrics["staleness/version_max"] = float(lags.max())
        metrics["staleness/mixed"] = sum(bool(call.spans) for call in calls)
    return metrics
