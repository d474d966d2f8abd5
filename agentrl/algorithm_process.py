"""The algorithm process of a run, with what `agentrl.algorithms` does not import.

It serves and trains the policies of the run, or only evaluates the upstreams of a run without any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.config import RunConfig
from agentrl.config.policies import has_no_own_policy

if TYPE_CHECKING:
    from agentrl.algorithms.train.features import Feature


def run_algorithm(config: RunConfig) -> None:
    """Train, or evaluate, until the run is complete."""
    if has_no_own_policy(config):
        from agentrl.algorithms.sampling.upstreams import main as evaluate

        evaluate(config)
    else:
        from agentrl.algorithms.train.main import main as train

        train(config, added_features(config))


def added_features(config: RunConfig) -> list[Feature]:
    """The features of training that `agentrl.algorithms` does not import, in their order."""
    from agentrl.live.training import Live
    from agentrl.view.training import RunOrigin
    from agentrl.vision.training import Looking

    live = [Live()] if config.live.running else []
    return [*live, RunOrigin(), Looking()]
