"""The registry of algorithms by name.

`make("grpo+tis", {"clip_high": 0.28, "tis_cap": 3.0})` builds an algorithm from a preset, any
modifiers, and the keyword options of all of them. An option that none of them has is an error.
Names that the library does not have are entry points of the group `agentrl.presets`, "+name" for a
modifier, or the user's own "file.py:name".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import msgspec

from agentrl.algorithms.credit.core import rewards_read
from agentrl.algorithms.objective.core import IN_WORDS, Algo
from agentrl.algorithms.objective.prepare import Prepare
from agentrl.algorithms.objective.ratios import LearnerOutput
from agentrl.algorithms.preferences import pairs  # noqa: F401  (registers its presets)
from agentrl.algorithms.presets import (  # noqa: F401  (importing them registers their presets)
    calls,
    declare,
    imitation,
    multiagent,
    policy_gradient,
    process,
    recipes,
    replays,
    states,
    teams,
    told,
    trust_regions,
)
from agentrl.algorithms.presets.declare import (
    EMPTY,
    KEY,
    AlgoModifier,
    AlgoPreset,
    CreditFunction,
    Num,
    Option,
    modifier_named,
    preset_named,
)
from agentrl.algorithms.presets.feedback import TURN, add_turns
from agentrl.core.config.derived import find_preset, preset_names
from agentrl.core.config.learning import AlgorithmConfig
from agentrl.core.errors import ConfigError, nearest
from agentrl.core.loading import import_error, load_attribute
from agentrl.core.plugins import check_call, where
from agentrl.core.user_code import contained

recipes.register()

# Functions that add rewards that no verifier gives, by name of the reward.
ADDED_REWARDS: Mapping[str, Prepare] = {
    process.HINDSIGHT: process.add_hindsight,
    TURN: add_turns,
}


def make(
    name: str,
    options: Mapping[str, Any],
    *,
    supplies: Collection[LearnerOutput] = ("old", "sampler"),
    root: Path = Path(),
) -> Algo:
    """The algorithm of `algorithm.preset` and `algorithm.options` in a run file.

    name: a preset of the library, of an installed package (entry points of the group
    agentrl.presets), or of the user's file or module ("mine.py:lenient"), optionally with modifiers
    ("grpo+tis"). supplies: what the learner computes besides the log-probs of the current policy:
    other log-probs, critic "values", the "top_tokens" at every position, the gradient of the
    "entropy". root: the folder of the user's files.

    Raises ConfigError for an unknown preset, modifier or option, a missing option, one of the wrong
    type or out of range, a stream that the run does not have, two corrections of one mismatch, and
    a user's preset that is not a function of options, raises, or does not return an Algo."""
    host, modifiers = parts_of_name(name, root)
    accepted = [host.options(), *(modifier.options() for modifier in modifiers)]
    valid = {option: kind for declared in accepted for option, kind in declared.items()}
    chosen = {option: _value(name, option, options[option], valid, root) for option in options}
    for option, (_, default) in sorted(valid.items()):
        if default is EMPTY and option not in chosen:
            raise ConfigError(f"algorithm.options.{option}: required by {name!r}; set it")
    arguments = [
        {option: chosen[option] for option in declared if option in chosen} for declared in accepted
    ]
    algo = _built(host, arguments[0])
    for modifier, own_options in zip(modifiers, arguments[1:], strict=True):
        algo = modifier.build(algo, **own_options)
    read = rewards_read(algo.credit, algo.keep, algo.side, algo.telling)
    # The rewards of plain functions are unknown; they are in `algo.rewards`, default the outcome.
    if not read or not is_dataclass(algo.credit):
        read = tuple(dict.fromkeys(algo.rewards + read))
    prepare = (*algo.prepare, *_adding(read))
    return _checked(replace(algo, rewards=read, prepare=prepare, name=name), supplies)


def parts_of_name(name: str, root: Path) -> tuple[AlgoPreset, list[AlgoModifier]]:
    """The preset and modifiers in a name like "grpo+tis", and `with_entropy`."""
    host, modifier_names = find_preset(name, declare.presets, declare.modifiers)
    return preset_named(host, root), [*map(modifier_named, modifier_names), ENTROPY]


def library_presets() -> tuple[dict[str, AlgoPreset], dict[str, AlgoModifier]]:
    """The library's presets and modifiers with its recipes, by name."""
    names = preset_names()
    return (
        {name: declare.presets[name] for name in sorted(names.hosts)},
        {name: declare.modifiers[name] for name in names.modifiers},
    )


def _adding(read: Collection[str]) -> list[Prepare]:
    """The functions that add to groups those rewards that an algorithm reads and the library
    computes."""
    return [add for reward, add in ADDED_REWARDS.items() if reward in read]


def _built(host: AlgoPreset, options: Mapping[str, Any]) -> Algo:
    try:
        with contained():
            return host.build(**options)
    except ConfigError:
        raise
    except Exception as error:  # user code can raise anything
        raise import_error(f"{KEY}: {where(host.function)}", error) from error


def with_entropy(algo: Algo, *, entropy: Num = 0.0) -> Algo:
    """Adds an entropy bonus, averaged over tokens as the loss is; every preset has this option.
    PPO, arXiv 1707.06347."""
    return replace(algo, entropy=entropy) if entropy else algo


ENTROPY = AlgoModifier("entropy", with_entropy)


def _value(name: str, option: str, value: Any, valid: Mapping[str, Option], root: Path) -> Any:
    if option not in valid:
        hint = nearest(option, valid) if valid else "it has no options"
        raise ConfigError(f"algorithm.options.{option}: no option of {name!r}; {hint}")
    kind, key = valid[option][0], f"algorithm.options.{option}"
    if kind is CreditFunction:
        credit = load_attribute(str(value), root, key=key)
        check_call(credit, "batch", key=key)
        return credit
    _check_tables(key, value, kind)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key} = {value!r}: {error}") from None


def _check_tables(key: str, value: Any, kind: Any) -> None:
    """Raise ConfigError for an unknown field in an option that is a table of tables."""
    inner = [inner for outer in get_args(kind) for inner in get_args(outer)]
    structs = [k for k in inner if isinstance(k, type) and issubclass(k, msgspec.Struct)]
    for struct in structs if isinstance(value, dict) else []:
        fields = {field.name for field in msgspec.structs.fields(struct)}
        for name, table in value.items():
            for field in set(table) - fields if isinstance(table, dict) else ():
                raise ConfigError(f"{key}.{name}.{field}: unknown; {nearest(field, fields)}")


def check_supplies(algo: Algo, supplies: Collection[str]) -> None:
    """Raise ConfigError if the algorithm needs the most probable tokens, or the gradient of the
    entropy or of observations, and the learner does not supply them."""
    if algo.entropy and "entropy" not in supplies:
        raise ConfigError(
            f"algorithm.options.entropy = {algo.entropy}: the learner of this run does not compute "
            "the gradient of the entropy; set it to 0, or learner.kind = 'torch'"
        )
    if algo.echo and "observations" not in supplies:
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} learns from what tools answered, which the learner "
            "of this run does not compute; leave +echo out, or set learner.kind = 'torch'"
        )
    if algo.topk and "top_tokens" not in supplies:
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} needs the most probable tokens at every position, "
            "which the learner of this run does not compute; choose dppo-tv or dppo-kl, or "
            "top = 0 of distill or told, which compare only the sampled token"
        )


def check_group(config: AlgorithmConfig, algo: Algo) -> None:
    """Raise ConfigError for a group size that the algorithm cannot learn from. Not checked if
    further rollouts join a group, which make it larger than `group_size`."""
    min_size = algo.min_group_size
    if config.group_size < min_size and not config.branching.joins:
        raise ConfigError(
            f"algorithm.group_size = {config.group_size}: {algo.name!r} with these options learns "
            f"nothing from groups of fewer than {min_size} rollouts, because the baseline of a "
            f"rollout needs k others; set algorithm.group_size = {min_size} or more, or a "
            "smaller algorithm.options.k"
        )


def check_staleness(config: AlgorithmConfig, algo: Algo) -> None:
    """Raise ConfigError if the run trains tokens of older versions and the algorithm would treat
    them as on-policy or uses a critic, whose values belong to the current version."""
    ahead = f"algorithm.max_staleness = {config.max_staleness:g}"
    if config.max_staleness and algo.reads_critic:
        raise ConfigError(
            f"{ahead}: {algo.name!r} compares returns of older versions with critic values of "
            "the current one; set it to 0, or choose a preset without a critic"
        )
    if config.max_staleness and "sampler" not in algo.needs:
        raise ConfigError(
            f"{ahead}: {algo.name!r} does not read the sampler's log-probs, so it would treat "
            "tokens of older versions as on-policy; add +tis, +behaviour or +decoupled to "
            "algorithm.preset, or choose scalerl, dppo-tv or minirl"
        )


def _checked(algo: Algo, supplies: Collection[str]) -> Algo:
    if algo.reads_critic and "values" not in supplies:
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} needs the values of a critic, which this "
            "run does not have; set critic.model, choose another preset, or name rewards that hold "
            "them in the preset's options, if it has such options"
        )
    check_supplies(algo, supplies)
    for stream in sorted(algo.needs - set(supplies)):
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} needs the log-probs of a {IN_WORDS[stream]}, "
            "which this run does not have; set its coefficient to 0 or choose another preset"
        )
    weights = [
        g.fn for g in algo.gates if g.den == "sampler" and not getattr(g.fn, "is_mask", False)
    ]
    if len(weights) > 1:
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} would correct for the sampler twice, by "
            f"{weights[0]} and {weights[1]}; remove one of them"
        )
    return algo
