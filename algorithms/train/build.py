"""Builds what a run trains with: algorithm, updater and state of every trained policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.diagnostics.bad_steps import BadSteps
from agentrl.algorithms.explain.credit_records import CreditRecorder
from agentrl.algorithms.explain.dump import keep_in
from agentrl.algorithms.judges.training import check_judges
from agentrl.algorithms.kl_target.training import with_kl_target
from agentrl.algorithms.learners import factory
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.objective.core import Algo, ReferenceControl
from agentrl.algorithms.preferences.collector import from_dataset, on_dataset
from agentrl.algorithms.presets import registry
from agentrl.algorithms.presets.registry import check_group, check_staleness
from agentrl.algorithms.replays.counterfactuals import (
    check_counterfactuals,
    with_optional_reward,
    with_role_rewards,
)
from agentrl.algorithms.reward_models.training import check_reward_models, with_reward_models
from agentrl.algorithms.sampling.collect import resampling_reward
from agentrl.algorithms.selfplay.pool import check_seat_comparison
from agentrl.algorithms.teachers.training import with_teacher_server
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.optimize import STEP_SIZE, KlLimit, largest_kl
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.prepare import Completer, Preprocessor, ProcessedScorer, Retokenizer
from agentrl.algorithms.train.step import Updater
from agentrl.config import RunConfig
from agentrl.config.policies import self_playing_policy, trained_policies, view
from agentrl.errors import ConfigError
from agentrl.types import POLICY


def load_algorithms(config: RunConfig) -> dict[str, Algo]:
    """Build the algorithm of each trained policy. Raises ConfigError for invalid settings."""
    algos = {}
    for name in trained_policies(config):
        try:
            algos[name] = load_algorithm(view(config, name))
        except ConfigError as error:
            where = f"policies.{name}: " if config.policies else ""
            raise ConfigError(f"{where}{error}") from None
    return algos


def group_requirements(config: RunConfig, algos: Mapping[str, Algo]) -> tuple[bool, str | None]:
    """The algorithms' requirements on groups, which all policies share: whether the first rollout
    is greedy, and the reward that must differ within a group, or None.

    Raises ConfigError if they disagree, or do not fit counterfactuals or self-play."""
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
    check_counterfactuals(config, algos, wanted[1])
    if config.selfplay.seats and config.steps:
        check_seat_comparison(algos[self_playing_policy(config)])
    return wanted


def load_algorithm(config: RunConfig) -> Algo:
    """Build the algorithm of the run file. Raises ConfigError for settings that do not fit it."""
    streams = factory.available_streams(config)
    settings = config.algorithm
    algo = registry.make(settings.preset, settings.options, streams=streams, root=Path(config.root))
    check_judges(config, algo)
    if config.data.name:
        algo = on_dataset(config, algo)
    algo = with_optional_reward(config.algorithm.counterfactual, algo)
    check_reward_models(config, algo)
    check_group(settings, algo)
    check_staleness(settings, algo)
    factory.refuse_unused_settings(config, algo)
    return algo


def make_policies(
    config: RunConfig,
    algos: Mapping[str, Algo],
    models: Sequence[LoadedModel],
    stack: AsyncExitStack,
) -> PolicySet:
    """Build the trained policies, with the state of the run. `stack` closes their learners."""
    updaters = {}
    for name, algo in algos.items():
        model = next(model for model in models if name in model.policies)
        made = make_updater(view(config, name), name, algo, model)
        stack.callback(made.learner.close)
        dumps = Path(config.output, "dumps", name if config.policies else "")
        updaters[name] = updater = extend_updater(made, model, dumps)
        if updater.limit is not None:
            updater.state.parts[STEP_SIZE] = updater.limit
    state = AlgorithmState() if config.policies else updaters[POLICY].state
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


def extend_updater(updater: Updater, model: LoadedModel, dumps: Path) -> Updater:
    """The updater with what the settings of its policy add to a step. dumps: the folder for the
    batches of failed optimizer steps."""
    config = updater.config
    if updater.bad_steps is not None:
        updater.bad_steps.keep = partial(keep_in, dumps)
    if config.algorithm.store_credit:
        updater = replace(updater, recorder=CreditRecorder(updater.policy))
    updater = with_kl_target(updater)
    if config.data.name:
        updater = from_dataset(updater)
    updater = with_role_rewards(updater)
    updater = with_reward_models(updater, model)
    return with_teacher_server(updater, model)
