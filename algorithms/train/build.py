"""Builds what a run trains with: algorithm, updater and state of every trained policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.diagnostics.bad_steps import BadSteps
from agentrl.algorithms.learners import factory
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.objective.core import Algo, ReferenceControl
from agentrl.algorithms.presets import registry
from agentrl.algorithms.presets.registry import check_group, check_staleness
from agentrl.algorithms.sampling.collect import resampling_reward
from agentrl.algorithms.train.hooks import Hooks, hooks_of
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.optimize import STEP_SIZE, KlLimit, largest_kl
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.prepare import Completer, Preprocessor, ProcessedScorer, Retokenizer
from agentrl.algorithms.train.step import Updater
from agentrl.config import RunConfig
from agentrl.config.policies import trained_policies, view
from agentrl.errors import ConfigError
from agentrl.types import POLICY


def load_algorithms(config: RunConfig, hooks: Hooks | None = None) -> dict[str, Algo]:
    """Build the algorithm of each trained policy. hooks: default, those of the run. Raises
    ConfigError for invalid settings."""
    algos, hooks = {}, hooks or hooks_of(config)
    for name in trained_policies(config):
        try:
            algos[name] = load_algorithm(view(config, name), hooks)
        except ConfigError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise ConfigError(f"{where}{error}") from None
    return algos


def group_requirements(
    config: RunConfig, algos: Mapping[str, Algo], hooks: Hooks | None = None
) -> tuple[bool, str | None]:
    """The algorithms' requirements on groups, which all policies share: whether the first rollout
    is greedy, and the reward that must differ within a group, or None.

    Raises ConfigError if they disagree, or do not fit what the run has by hooks."""
    required = {
        name: (algo.needs_greedy, resampling_reward(view(config, name).algorithm, algo))
        for name, algo in algos.items()
    }
    (first, wanted), *others = required.items()
    for name, other in others:
        if other != wanted:
            raise ConfigError(
                f"policies.{first} and policies.{name} learn from the same groups, and their "
                f"presets {algos[first].name!r} and {algos[name].name!r} need different ones (a "
                "greedy rollout, or dynamic sampling); choose presets that agree, or set "
                "algorithm.dynamic_sampling = false"
            )
    (hooks or hooks_of(config)).check(algos, wanted[1])
    return wanted


def load_algorithm(config: RunConfig, hooks: Hooks | None = None) -> Algo:
    """Build the algorithm of the run file. Raises ConfigError for settings that do not fit it."""
    streams = factory.available_streams(config)
    settings = config.algorithm
    algo = registry.make(settings.preset, settings.options, streams=streams, root=Path(config.root))
    algo = (hooks or hooks_of(config)).algorithm(config, algo)
    check_group(settings, algo)
    check_staleness(settings, algo)
    factory.refuse_unused_settings(config, algo)
    return algo


def make_policies(
    config: RunConfig,
    algos: Mapping[str, Algo],
    models: Sequence[LoadedModel],
    stack: AsyncExitStack,
    hooks: Hooks | None = None,
) -> PolicySet:
    """Build the trained policies, with the state of the run. `stack` closes their learners."""
    updaters, hooks = {}, hooks or hooks_of(config)
    for name, algo in algos.items():
        model = next(model for model in models if name in model.policies)
        made = make_updater(view(config, name), name, algo, model)
        stack.callback(made.learner.close)
        updaters[name] = updater = hooks.updater(made, model)
        if updater.limit is not None:
            updater.state.parts[STEP_SIZE] = updater.limit
    state = AlgorithmState() if config.policies else updaters[POLICY].state
    state.parts |= hooks.state()
    return PolicySet(config, updaters, state)


def make_updater(config: RunConfig, name: str, algo: Algo, model: LoadedModel) -> Updater:
    """Build the updater of one policy. config: the policy's view of the run."""
    settings, tokenizer = config.algorithm, model.tokenizer
    learner = factory.make_learner(config, algo, model.model, tokenizer, model.adapters, name)
    context = context_length(model.model)
    completers: list[Completer] = [ProcessedScorer(learner, context, name, algo.rewards)]
    if settings.missing_token_ids == "retokenize":  # before reward models, which need the token ids
        completers.append(Retokenizer(tokenizer, learner, context, name, algo.rewards))
    return Updater(
        config,
        algo,
        learner,
        state=AlgorithmState(algo.remembered, seed=config.seed),
        preprocessor=Preprocessor(
            tuple(completers), context=context, policy=name, tokenizer=tokenizer
        ),
        reference_control=ReferenceControl(learner.frozen.get("reference")),
        bad_steps=BadSteps(settings.max_bad_steps),
        policy=name,
        limit=KlLimit(learner, largest_kl(settings), config.seed, name),
    )
