"""Before the first step of a run: estimates on the console, and the proof of its packing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from agentrl.algorithms.preflight import estimate
from agentrl.algorithms.preflight.duration import duration
from agentrl.algorithms.preflight.proof import trie_gap
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.base.processes import log_phase
from agentrl.config import RunConfig
from agentrl.config.policies import trained_policies, view
from agentrl.errors import PolicyError

log = logging.getLogger("agentrl.algorithm")


def announce(config: RunConfig, models: Sequence[LoadedModel]) -> None:
    """Log the estimates of a run that is about to train, as a warning if memory is too small."""
    learning = trained_policies(config) if config.steps and config.learner.kind == "torch" else []
    for model in (each for each in models if set(each.policies).intersection(learning)):
        own = view(config, next(name for name in model.policies if name in learning))
        fits, sentence = estimate.memory(own, model.model)
        if fits:
            log_phase(log, f"memory: about {sentence.partition(':')[0]}")
        (log.info if fits else log.warning)("memory: about %s", sentence)
        for line in duration(own, model.model):
            log_phase(log, line)


def with_proven_packing(config: RunConfig, models: Sequence[LoadedModel]) -> RunConfig:
    """The settings, with packing = "rows" on hardware on which trie packing gives other log-probs.

    Raises PolicyError there if the run file sets "trie"."""
    if config.learner.kind != "torch" or config.learner.packed == "rows":
        return config
    trained = set(trained_policies(config))
    for model in models:
        gap = trie_gap(model.model, model.tokenizer) if set(model.policies) & trained else None
        if gap is None or gap.within(config.policy):
            continue
        if config.learner.packing == "trie":
            raise PolicyError(f"learner.packing = 'trie' differs here: {gap}; set it to 'rows'")
        log.warning("Prefixes are not packed on this hardware (learner.packing = rows): %s.", gap)
        return replace(config, learner=replace(config.learner, packing="rows"))
    return config


def forecast(config: RunConfig) -> list[str]:
    """The estimates for the models of a run file, which are not loaded."""
    if config.learner.kind != "torch":
        return []
    found: list[str] = []
    views = (view(config, name) for name in trained_policies(config))
    for source, own in {each.model_path(): each for each in views}.items():
        if own.policy.build and not Path(source or "?").is_dir():
            return ["memory and time are estimated at the start of the run, after policy.build"]
        try:
            found += estimate.describe(own, source) if source else []
        except (OSError, ValueError):  # it is on the hub
            found.append(f"memory and time of {source} are unknown; agentrl doctor asks the hub")
    return found
