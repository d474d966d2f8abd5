"""The report of a training step: what was in its groups, its batch and its critic's targets."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from statistics import fmean

import torch

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import own_calls, token_versions
from agentrl.algorithms.diagnostics.metrics import Metrics, batch_metrics
from agentrl.algorithms.objective.values import ValueTerms, value_metrics
from agentrl.types import POLICY, Group


def staleness(
    step: int, groups: Sequence[Group], policy: str = POLICY, *, version: int | None = None
) -> Metrics:
    """Age of the data of step `step`. staleness/steps_mean, steps_max: steps since a group was
    requested. staleness/version_mean, version_p95, version_max: updates of the policy since a token
    was sampled, over tokens with a known version. staleness/mixed: number of calls during which
    weights changed. version: the policy's current version, default `step`."""
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


def report(
    step: int,
    version: int,
    groups: Sequence[Group],
    batch: Batch,
    values: ValueTerms | None,
    policy: str = POLICY,
) -> Metrics:
    """The metrics of a step of a policy, besides those of its optimizer steps. version: the
    policy's before the step."""
    return {
        **batch_metrics(groups, batch, policy),
        **staleness(step, groups, policy, version=version),
        **(value_metrics(values) if values else {}),
    }
