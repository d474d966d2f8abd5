"""Build an algorithm from a name and options.

A preset is a function of keyword options that returns an `Algo`. A modifier takes an Algo first and
applies to any preset as "+name". An option that none of the named functions has is an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from agentrl.algorithms.credit.core import Credit
from agentrl.algorithms.credit.parts import rewards_read
from agentrl.algorithms.objective.core import IN_WORDS, Algo, Gate, KLPenalty
from agentrl.algorithms.objective.prepare import Prepare
from agentrl.algorithms.objective.ratios import Clip, Model
from agentrl.base.loading import import_error, load_attribute
from agentrl.config.base import installed_plugins
from agentrl.config.presets import split_preset
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError, nearest
from agentrl.plugins import check_call, load_plugin, where

# Types of options.
Num = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Discount = Annotated[float, msgspec.Meta(ge=0, le=1)]
Cap = Annotated[float, msgspec.Meta(gt=0)]  # inf: no cap
Share = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Mix = Annotated[dict[str, Share], msgspec.Meta(min_length=1)]  # reward name to weight
CreditFunction = Annotated[Credit, "file.py:name"]  # from a batch to advantages [N]
Names = Annotated[list[str], msgspec.Meta(min_length=1)]
Scale = Literal["none", "std"]

Supply = Model | Literal["values", "top_tokens", "entropy"]
Preset = Callable[..., Algo]
EMPTY = inspect.Parameter.empty
ONLY = inspect.Parameter.KEYWORD_ONLY
PPO_CLIP = (0.2, 0.2)
# Options that many presets have: `preset` declares and implements them.
SHARED: dict[str, Any] = {
    "reward": str, "clip_low": Num, "clip_high": Num, "clip_dual": Cap, "kl": Num,
}  # fmt: skip
presets: dict[str, Preset] = {}
modifiers: dict[str, Preset] = {}
hosts: dict[str, str] = {}  # per modifier, the preset to show it with
# By reference of a reward, what adds it to groups if an algorithm reads it.
added_rewards: dict[str, Prepare] = {}


def preset(
    name: str,
    *,
    reward: str = "outcome",
    clip: tuple[float, ...] = (),
    clip_by: Literal["transition", "row"] | None = None,
    kl: bool = False,
) -> Callable[[Preset], Preset]:
    """Register a function of keyword options under a name.

    reward: default of the option `reward`, if the function has a parameter of that name. clip:
    defaults of the options clip_low, clip_high and (optionally) clip_dual of PPO's clip on the
    ratio of current to old policy, pooled over each `clip_by`. kl: add the option kl, the
    coefficient of a k3 KL penalty to the reference.

    Raises ConfigError for the name of one of the library's own presets."""

    def register(function: Preset) -> Preset:
        _check_free(name, presets, function)
        presets[name] = _with_shared_options(function, reward, clip, clip_by, kl)
        return presets[name]

    return register


def _check_free(name: str, taken: Mapping[str, Preset], function: Preset) -> None:
    own = taken.get(name)
    if own is not None and own.__module__.startswith("agentrl.algorithms."):
        raise ConfigError(
            f"algorithm.preset: {where(function)} hides the library's own {name!r}; choose "
            "another name"
        )


def _with_shared_options(
    function: Preset,
    reward: str = "outcome",
    clip: tuple[float, ...] = (),
    clip_by: Literal["transition", "row"] | None = None,
    kl: bool = False,
) -> Preset:
    """The function with the requested options of `SHARED`: see `preset`."""
    own = inspect.signature(function).parameters
    takes_reward = "reward" in own and own["reward"].kind is not ONLY
    bounds = dict(zip(("clip_low", "clip_high", "clip_dual"), clip, strict=False))
    defaults: dict[str, Any] = {"reward": reward} if takes_reward else {}
    defaults |= bounds | ({"kl": 0.0} if kl else {})

    def build(**options: Any) -> Algo:
        given = defaults | options
        limits = [given.pop(option) for option in bounds]
        beta = given.pop("kl") if kl else 0.0
        algo = function(**given)
        if not isinstance(algo, Algo):
            raise ConfigError(
                f"algorithm.preset: {where(function)} returned {type(algo).__name__}, which is no "
                "Algo; return Algo(...) instead"
            )
        if limits:
            algo = replace(algo, gates=(Gate(Clip(*limits), by=clip_by), *algo.gates))
        return replace(algo, penalties=(KLPenalty("k3", beta), *algo.penalties)) if beta else algo

    shared = [
        inspect.Parameter(option, ONLY, default=x, annotation=SHARED[option])
        for option, x in defaults.items()
    ]
    others = [parameter for option, parameter in own.items() if option not in defaults]
    first = int(takes_reward)
    return declared(build, function, [*shared[:first], *others, *shared[first:]])


def modifier(name: str, *, prefix: str = "", host: str = "grpo") -> Callable[[Preset], Preset]:
    """Register a function of an Algo and keyword options that applies to any preset as "+name".

    prefix: prepended to its options in a run file, to tell them from the preset's. host: the preset
    to show it with. Raises ConfigError for the name of one of the library's own modifiers."""

    def register(function: Preset) -> Preset:
        def change(algo: Algo, **options: Any) -> Algo:
            return function(algo, **{key.removeprefix(prefix): x for key, x in options.items()})

        algo, *options = inspect.signature(function).parameters.values()
        renamed = [option.replace(name=prefix + option.name) for option in options]
        _check_free(name, modifiers, function)
        modifiers[name] = declared(change, function, [algo, *renamed])
        hosts[name] = host
        return function

    return register


def as_modifier(name: str, *, prefix: str) -> Callable[[Preset], Preset]:
    """Also register a preset as a modifier that replaces the host's credit by the preset's credit,
    computed from the host's reward. Its options are the preset's own, with a prefix."""

    def register(built: Preset) -> Preset:
        function = inspect.unwrap(built)

        @functools.wraps(function)
        def change(algo: Algo, **options: Any) -> Algo:
            return replace(algo, credit=function(outcome_of(algo), **options).credit)

        change.__doc__ = f"Instead of the host's credit: {inspect.getdoc(function)}"
        modifier(name, prefix=prefix)(change)
        return built

    return register


def declared(
    build: Preset, function: Callable[..., Any], parameters: list[inspect.Parameter]
) -> Preset:
    """`build` with the name and docstring of `function`, and these parameters."""
    functools.update_wrapper(build, function)
    build.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    build.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not EMPTY}
    return build


def outcome_of(algo: Algo) -> str:
    """The first reward that an algorithm reads."""
    return next(iter(rewards_read(algo.credit)), "outcome")


def make(
    name: str,
    options: Mapping[str, Any],
    *,
    streams: Collection[Supply] = ("old", "sampler"),
    root: Path = Path(),
) -> Algo:
    """The algorithm of `algorithm.preset` and `algorithm.options` in a run file.

    name: a preset of the library, of an installed package (entry points of the group
    agentrl.presets), or of the user's file or module ("mine.py:lenient"), optionally with modifiers
    ("grpo+tis"). streams: what the learner supplies besides the log-probs of the current policy:
    other log-probs, critic "values", the "top_tokens" at every position, the gradient of the
    "entropy". root: the folder of the user's files.

    Raises ConfigError for an unknown preset, modifier or option, a missing option, one of the wrong
    type or out of range, a stream that the run does not have, two corrections of one mismatch, and
    a user's preset that is no function of options, raises, or does not return an Algo."""
    parts = _functions(name, root)
    accepted = [_options(part) for part in parts]
    valid = {option: kind for own in accepted for option, kind in own.items()}
    chosen = {option: _value(name, option, options[option], valid, root) for option in options}
    for option, (_, default) in sorted(valid.items()):
        if default is EMPTY and option not in chosen:
            raise ConfigError(f"algorithm.options.{option}: required by {name!r}; set it")
    given = [{option: chosen[option] for option in own if option in chosen} for own in accepted]
    algo = _built(parts[0], given[0])
    for part, own_options in zip(parts[1:], given[1:], strict=True):
        algo = part(algo, **own_options)
    read = rewards_read(algo.credit, algo.keep, algo.side)
    # The rewards of plain functions are unknown; they are in `algo.rewards`, default the outcome.
    if not read or not is_dataclass(algo.credit):
        read = tuple(dict.fromkeys(algo.rewards + read))
    adding = tuple(added_rewards[reward] for reward in read if reward in added_rewards)
    prepare = (*algo.prepare, *adding)
    return _checked(replace(algo, rewards=read, prepare=prepare, name=name), streams)


def options_of(name: str) -> dict[str, Any]:
    """Options of a preset with modifiers, with defaults (`EMPTY`: required). Raises as `make`."""
    accepted = [_options(part) for part in _functions(name, Path())]
    return {option: default for own in accepted for option, (_, default) in own.items()}


def _options(part: Preset) -> dict[str, tuple[Any, Any]]:
    """Type and default of each option of a preset or modifier."""
    hints = get_type_hints(part, include_extras=True)
    parameters = inspect.signature(part).parameters.values()
    return {p.name: (hints[p.name], p.default) for p in parameters if p.kind is ONLY}


def _functions(name: str, root: Path) -> list[Preset]:
    """The preset and modifiers in a name like "grpo+tis"."""
    host, added = split_preset(name, presets, modifiers)
    return [_preset(host, root), *(modifiers[word] for word in added), with_entropy]


def _preset(name: str, root: Path) -> Preset:
    registered = installed_plugins("presets").names
    if ":" not in name and name not in presets and name not in registered:
        raise ConfigError(
            f"algorithm.preset: no preset {name!r}; {nearest(name, [*presets, *registered])}"
        )
    thing = load_plugin("presets", name, presets, root, key="algorithm.preset")
    if thing is None:
        return presets[name]
    if not callable(thing):
        check_call(thing, key="algorithm.preset")
    function: Preset = thing if hasattr(thing, "__signature__") else _with_shared_options(thing)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not ONLY or parameter.annotation is EMPTY:
            raise ConfigError(
                f"algorithm.preset: the parameter {parameter.name!r} of "
                f"{where(inspect.unwrap(function))} is no keyword-only option with a type; write "
                "def name(*, option: float = 0.5) -> Algo"
            )
    return function


def _built(host: Preset, options: Mapping[str, Any]) -> Algo:
    try:
        return host(**options)
    except ConfigError:
        raise
    except Exception as error:  # user code can raise anything
        raise import_error(f"algorithm.preset: {where(inspect.unwrap(host))}", error) from error


def with_entropy(algo: Algo, *, entropy: Num = 0.0) -> Algo:
    """Adds an entropy bonus, averaged over tokens as the loss is; every preset has this option.
    PPO, arXiv 1707.06347."""
    return replace(algo, entropy=entropy) if entropy else algo


def _value(
    name: str, option: str, value: Any, valid: Mapping[str, tuple[Any, Any]], root: Path
) -> Any:
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
    inner = [part for outer in get_args(kind) for part in get_args(outer)]
    structs = [k for k in inner if isinstance(k, type) and issubclass(k, msgspec.Struct)]
    for struct in structs if isinstance(value, dict) else []:
        fields = {field.name for field in msgspec.structs.fields(struct)}
        for name, table in value.items():
            for field in set(table) - fields if isinstance(table, dict) else ():
                raise ConfigError(f"{key}.{name}.{field}: unknown; {nearest(field, fields)}")


def check_supplies(algo: Algo, supplies: Collection[str]) -> None:
    """Raise ConfigError if the algorithm needs the most probable tokens or the gradient of the
    entropy and the learner does not supply it."""
    if algo.entropy and "entropy" not in supplies:
        raise ConfigError(
            f"algorithm.options.entropy = {algo.entropy}: the learner of this run does not compute "
            "the gradient of the entropy; set it to 0, or learner.kind = 'torch'"
        )
    if algo.symbols and "top_tokens" not in supplies:
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} needs the most probable tokens at every position, "
            "which the learner of this run does not compute; choose dppo-tv or dppo-kl, or "
            "top = 0 of distill, which compare only the sampled token"
        )


def check_group(config: AlgorithmConfig, algo: Algo) -> None:
    """Raise ConfigError for a group size that the algorithm cannot learn from. Branching is not
    checked: it makes groups larger than `group_size`."""
    if config.branching.kind == "none" and config.group_size < algo.group:
        raise ConfigError(
            f"algorithm.group_size = {config.group_size}: {algo.name!r} with these options learns "
            f"nothing from groups of fewer than {algo.group} rollouts, because the baseline of a "
            f"rollout needs k others; set algorithm.group_size = {algo.group} or more, or a "
            "smaller algorithm.options.k"
        )


def check_staleness(config: AlgorithmConfig, algo: Algo) -> None:
    """Raise ConfigError if the run trains tokens of older versions and the algorithm would treat
    them as on-policy or uses a critic, whose values belong to the current version."""
    ahead = f"algorithm.max_staleness = {config.max_staleness:g}"
    if config.max_staleness and algo.critic:
        raise ConfigError(
            f"{ahead}: {algo.name!r} compares returns of older versions with critic values of "
            "the current one; set it to 0, or choose a preset without a critic"
        )
    if config.target_kl is not None and algo.old_from_versions:
        raise ConfigError(
            "algorithm.target_kl measures how far the policy moved from the old one, which "
            "decoupled_old = 'versions' does not compute; remove one of them"
        )
    if config.max_staleness and "sampler" not in algo.needs:
        raise ConfigError(
            f"{ahead}: {algo.name!r} does not read the sampler's log-probs, so it would treat "
            "tokens of older versions as on-policy; add +tis, +behaviour or +decoupled to "
            "algorithm.preset, or choose scalerl, dppo-tv or minirl"
        )


def _checked(algo: Algo, streams: Collection[str]) -> Algo:
    if algo.critic and "values" not in streams:
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} needs the values of a critic, which this "
            "run does not have; set critic.model, choose another preset, or name rewards that hold "
            "them in the preset's options, if it has such options"
        )
    check_supplies(algo, streams)
    for stream in sorted(algo.needs - set(streams)):
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
