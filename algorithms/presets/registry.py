"""Building an algorithm from a name and options.

A preset is a function of keyword options that returns an `Algo`; a modifier takes an Algo first and
applies to any preset as "+name". What is not an option of the named ones is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from agentrl.algorithms.credit.core import rewards_read
from agentrl.algorithms.objective.core import STREAMS, Algo, Stream
from agentrl.algorithms.objective.ratios import InRange, OffPolicyMask
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError, nearest

Num = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Discount = Annotated[float, msgspec.Meta(ge=0, le=1)]
Cap = Annotated[float, msgspec.Meta(gt=0)]  # inf: none
Share = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Mix = Annotated[dict[str, Share], msgspec.Meta(min_length=1)]  # reward name to weight
Supply = Stream | Literal["v", "k", "e"]
Preset = Callable[..., Algo]
EMPTY = inspect.Parameter.empty
presets: dict[str, Preset] = {}
modifiers: dict[str, Preset] = {}


def preset(name: str) -> Callable[[Preset], Preset]:
    """Register a function of keyword options under a name."""
    return lambda function: presets.setdefault(name, function)


def modifier(name: str) -> Callable[[Preset], Preset]:
    """Register a function of an Algo and keyword options; it applies to any preset as "+name"."""
    return lambda function: modifiers.setdefault(name, function)


def make(
    name: str, options: Mapping[str, Any], *, streams: Collection[Supply] = ("o", "b")
) -> Algo:
    """The algorithm that a run file names as `algorithm.preset` with `algorithm.options`.

    streams: what the learner can supply besides the log-probs of the current policy: other
    log-probs, values ("v") if it has a critic, the most probable tokens ("k") and the gradient of
    the entropy ("e"). Raises ConfigError for an unknown preset, modifier or option, a missing one,
    an option of the wrong type or out of range, a stream that is not to be had, and two corrections
    of one mismatch."""
    host, *added = _split(name)
    accepted = [_keywords(part) for part in (host, *added)]
    valid = {option: kind for keywords in accepted for option, kind in keywords.items()}
    chosen = {option: _value(name, option, options[option], valid) for option in options}
    required = [key for key, default in options_of(name).items() if default is EMPTY]
    for option in sorted(set(required) - chosen.keys()):
        raise ConfigError(f"algorithm.options.{option}: {name!r} cannot do without; set it")
    shares = [
        {option: chosen[option] for option in keywords.keys() & chosen.keys()}
        for keywords in accepted
    ]
    algo = host(**shares[0])
    for part, share in zip(added, shares[1:], strict=True):
        algo = part(algo, **share)
    read = rewards_read(algo.credit, algo.keep)
    return _checked(replace(algo, rewards=read, name=name), streams)


def options_of(name: str) -> dict[str, Any]:
    """The options of a preset with its modifiers and their defaults (`EMPTY`: it must be
    set). Raises ConfigError as `make` does."""
    signatures = [inspect.signature(part).parameters.values() for part in _split(name)]
    keywords = (p for parameters in signatures for p in parameters)
    return {p.name: p.default for p in keywords if p.kind is p.KEYWORD_ONLY}


def _split(name: str) -> list[Preset]:
    """The functions that "grpo+tis" names; a preset's own name may contain "+"."""
    hosts = [host for host in presets if f"{name}+".startswith(f"{host}+")]
    if not hosts:
        first = name.split("+")[0]
        raise ConfigError(f"algorithm.preset: no preset {first!r}; {nearest(first, presets)}")
    host = max(hosts, key=len)
    added = name.removeprefix(host).split("+")[1:]
    for word in added:
        if word not in modifiers:
            raise ConfigError(
                f"algorithm.preset: no modifier +{word} for {host!r}; {nearest(word, modifiers)}"
            )
    return [presets[host], *(modifiers[word] for word in added), with_entropy]


def with_entropy(algo: Algo, *, entropy: Num = 0.0) -> Algo:
    """What every preset accepts: a bonus for the entropy of the policy at every token in the loss,
    averaged as the loss is. PPO, arXiv 1707.06347."""
    return replace(algo, entropy=entropy) if entropy else algo


def _keywords(part: Preset) -> dict[str, Any]:
    hints = get_type_hints(part, include_extras=True)
    keywords = inspect.signature(part).parameters.values()
    return {p.name: hints[p.name] for p in keywords if p.kind is p.KEYWORD_ONLY}


def _value(name: str, option: str, value: Any, valid: Mapping[str, Any]) -> Any:
    if option not in valid:
        hint = nearest(option, valid) if valid else "it has none"
        raise ConfigError(f"algorithm.options.{option}: no option of {name!r}; {hint}")
    _check_tables(option, value, valid[option])
    try:
        return msgspec.convert(value, valid[option])
    except msgspec.ValidationError as error:
        raise ConfigError(f"algorithm.options.{option} = {value!r}: {error}") from None


def _check_tables(option: str, value: Any, kind: Any) -> None:
    """The fields of an option that is a table of tables."""
    inner = [part for outer in get_args(kind) for part in get_args(outer)]
    structs = [k for k in inner if isinstance(k, type) and issubclass(k, msgspec.Struct)]
    for struct in structs if isinstance(value, dict) else []:
        fields = {field.name for field in msgspec.structs.fields(struct)}
        for name, table in value.items():
            for field in set(table) - fields if isinstance(table, dict) else ():
                raise ConfigError(
                    f"algorithm.options.{option}.{name}.{field}: unknown; {nearest(field, fields)}"
                )


def check_supplies(algo: Algo, supplies: Collection[str]) -> None:
    """Raises ConfigError for an algorithm that reads symbols where none are to be had, or learns
    entropy where its gradient is not."""
    if algo.entropy and "e" not in supplies:
        raise ConfigError(
            f"algorithm.options.entropy = {algo.entropy}: the learner of this run does not give "
            "the gradient of the entropy; set it to 0, or learner.kind = 'torch'"
        )
    if algo.symbols and "k" not in supplies:
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} needs the most probable tokens at every place, "
            "which the learner of this run does not give; choose dppo-tv or dppo-kl, which compare "
            "the sampled token alone"
        )


def check_group(config: AlgorithmConfig, algo: Algo) -> None:
    """Raises ConfigError for groups that are too small to learn anything from. Branches make a
    group larger than it was asked for."""
    if config.branching.kind == "none" and config.group_size < algo.group:
        raise ConfigError(
            f"algorithm.group_size = {config.group_size}: {algo.name!r} with these options learns "
            f"nothing from groups of fewer than {algo.group} rollouts, because the baseline of a "
            f"rollout is made of k others; set algorithm.group_size = {algo.group} or more, or a "
            "smaller algorithm.options.k"
        )


def _checked(algo: Algo, streams: Collection[str]) -> Algo:
    if algo.critic and "v" not in streams:
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} needs the values of a critic (stream v), which this "
            "run does not have; set critic.model, choose another preset, or where there is an "
            "option `value`, name a reward that holds them"
        )
    check_supplies(algo, streams)
    for stream in sorted(algo.needs - set(streams)):
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} needs the log-probs of a {STREAMS[stream]}, which "
            "this run does not have; set its coefficient to 0 or choose another preset"
        )
    weighing = [
        g for g in algo.gates if g.den == "b" and not isinstance(g.fn, InRange | OffPolicyMask)
    ]
    if len(weighing) > 1:
        raise ConfigError(
            f"algorithm.preset = {algo.name!r} would correct for the sampler twice, by "
            f"{weighing[0].fn} and {weighing[1].fn}; leave one out"
        )
    return algo
