"""Declarations of algorithms: a preset is a function of keyword options that returns an `Algo`, a
modifier a function of an Algo and options that returns another.

`@preset` and `@modifier` write a record into a table and leave the function as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

from agentrl.algorithms.credit.core import Credit, rewards_read
from agentrl.algorithms.objective.core import ROW_SUMS, TOKENS, Algo, Average, Gate, KLPenalty
from agentrl.algorithms.objective.ratios import Clip
from agentrl.core.config import Natural
from agentrl.core.config.derived import preset_names
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import check_call, load_plugin, plugin_points, where

# Types of options.
Num = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Discount = Annotated[float, msgspec.Meta(ge=0, le=1)]
Cap = Annotated[float, msgspec.Meta(gt=0)]  # inf: no cap
Share = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Mix = Annotated[dict[str, Share], msgspec.Meta(min_length=1)]  # reward name to weight
CreditFunction = Annotated[Credit, "file.py:name"]  # from a batch to advantages [N]
Names = Annotated[list[str], msgspec.Meta(min_length=1)]
Scale = Literal["none", "std"]
RatioUnit = Literal["token", "transition", "row"]
AverageName = Literal["row", "token", "rollout", "sum"]

AVERAGES: Mapping[AverageName, Average] = {
    "row": Average(("row",)),
    "token": TOKENS,
    "rollout": Average(("rollout",)),
    "sum": ROW_SUMS,
}

KEY = "algorithm.preset"
PPO_CLIP = (0.2, 0.2)
EMPTY = inspect.Parameter.empty
ONLY = inspect.Parameter.KEYWORD_ONLY
Build = TypeVar("Build", bound=Callable[..., Any])


class Option(NamedTuple):
    kind: Any
    default: Any  # EMPTY: required


def options_of_function(function: Callable[..., Any]) -> dict[str, Option]:
    """The keyword-only parameters with a type annotation, by name."""
    hints = get_type_hints(function, include_extras=True)
    options = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is ONLY and name in hints:
            options[name] = Option(hints[name], parameter.default)
    return options


@dataclass(frozen=True, slots=True)
class AlgoPreset:
    """A function of keyword options, and the shared options that it asks for: see `preset`.

    A recipe has the function of the preset that it is based on (`of`, which may also name
    modifiers), with other defaults and its own description."""

    name: str
    function: Callable[..., Any]
    reward: str = "outcome"
    clip: tuple[float, ...] = ()
    clip_by: RatioUnit | None = None
    average: AverageName | None = None
    kl: bool = False
    of: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def options(self) -> dict[str, Option]:
        """Type and default of each option, as a run file may set them. Raises ConfigError for a
        parameter that cannot be an option, and for one that `@preset` declares too."""
        options = options_of_function(self.function)
        for name, parameter in inspect.signature(self.function).parameters.items():
            if name not in options and not (name == "reward" and self._takes_reward()):
                raise ConfigError(
                    f"algorithm.preset: the parameter {parameter.name!r} of "
                    f"{where(self.function)} is not a keyword-only option with a type; write "
                    "def name(*, option: float = 0.5) -> Algo"
                )
        for name in sorted(self._shared_options().keys() & options.keys()):
            raise ConfigError(
                f"algorithm.preset: the option {name!r} of {where(self.function)} is declared by "
                "@preset, too; rename it, or remove the argument of @preset"
            )
        reward = {"reward": Option(str, self.reward)} if self._takes_reward() else {}
        return with_defaults(reward | options | self._shared_options(), self.defaults)

    @property
    def doc(self) -> str:
        return self.text or inspect.getdoc(self.function) or ""

    def build(self, **options: Any) -> Algo:
        """The algorithm. Raises ConfigError if the function returns something else, or an `agg`
        that the declared average would replace, and for options that contradict each other."""
        requested_average, options = options.get("average"), {**self.defaults, **options}
        if requested_average == "sum" and options.get("length"):
            raise ConfigError(
                f"algorithm.options.length = {options['length']}: with average = 'sum' nothing is "
                "divided by a length; set length = 0, or remove average"
            )
        parameters = inspect.signature(self.function).parameters.keys()
        shared = {"reward": self.reward} if self._takes_reward() else {}
        algo = self.function(**shared | {key: x for key, x in options.items() if key in parameters})
        if not isinstance(algo, Algo):
            raise ConfigError(
                f"algorithm.preset: {where(self.function)} returned {type(algo).__name__}, which "
                "is not an Algo; return Algo(...) instead"
            )
        if self.average and algo.agg is not Algo.agg:
            raise ConfigError(
                f"algorithm.preset: {where(self.function)} returned an Algo with an agg, which "
                f"@preset(average={self.average!r}) would replace; remove one of the two"
            )
        algo = self._shared(algo, options)
        for word in self.of.split("+")[1:]:
            algo = modifiers[word].build(algo)
        return algo

    def _shared(self, algo: Algo, options: Mapping[str, Any]) -> Algo:
        """`algo` with PPO's clip, the average of the loss and the KL penalty."""
        if bounds := self._bounds():
            limits = [options.get(name, default) for name, default in bounds.items()]
            unit = options.get("clip_by", self.clip_by)
            gate = Gate(Clip(*limits), by=None if unit == "token" else unit)
            algo = replace(algo, gates=(gate, *algo.gates))
        if self.average:
            agg, length = AVERAGES[options.get("average", self.average)], options.get("length", 0)
            agg = replace(agg, inner="const", const=length) if length else agg
            algo = replace(algo, agg=agg)
        beta = options.get("kl", 0.0) if self.kl else 0.0
        return replace(algo, penalties=(KLPenalty("k3", beta), *algo.penalties)) if beta else algo

    def _shared_options(self) -> dict[str, Option]:
        """The options that `@preset` declares besides the reward."""
        kinds = {"clip_low": Num, "clip_high": Num, "clip_dual": Cap}
        shared = {name: Option(kinds[name], x) for name, x in self._bounds().items()}
        if self.clip_by:
            shared["clip_by"] = Option(RatioUnit, self.clip_by)
        if self.average:
            shared["average"] = Option(AverageName, self.average)
            shared["length"] = Option(Natural, 0)
        return shared | ({"kl": Option(Num, 0.0)} if self.kl else {})

    def _takes_reward(self) -> bool:
        parameter = inspect.signature(self.function).parameters.get("reward")
        return parameter is not None and parameter.kind is not ONLY

    def _bounds(self) -> dict[str, float]:
        return dict(zip(("clip_low", "clip_high", "clip_dual"), self.clip, strict=False))


@dataclass(frozen=True, slots=True)
class AlgoModifier:
    """A function of an Algo and keyword options. prefix: that of its options in a run file. host:
    the preset that the documentation shows it with.

    A recipe has the function of the modifier that it is based on (`of`), or of the preset whose
    credit replaces the host's (`credit_only`), with other defaults and its own description."""

    name: str
    function: Callable[..., Algo]
    prefix: str = ""
    host: str = "grpo"
    of: str = ""
    credit_only: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def options(self) -> dict[str, Option]:
        options = with_defaults(options_of_function(self.function), self.defaults)
        return {self.prefix + name: option for name, option in options.items()}

    @property
    def doc(self) -> str:
        return self.text or inspect.getdoc(self.function) or ""

    def build(self, algo: Algo, **options: Any) -> Algo:
        arguments = {name.removeprefix(self.prefix): x for name, x in options.items()}
        arguments = {**self.defaults, **arguments}
        if self.credit_only:
            return replace(algo, credit=self.function(outcome_of(algo), **arguments).credit)
        return self.function(algo, **arguments)


def with_defaults(options: dict[str, Option], defaults: Mapping[str, Any]) -> dict[str, Option]:
    return {
        name: Option(kind, defaults.get(name, default)) for name, (kind, default) in options.items()
    }


presets: dict[str, AlgoPreset] = {}
# Also by function: two files may use one name.
declared: dict[Callable[..., Any], AlgoPreset] = {}
modifiers: dict[str, AlgoModifier] = {}


def preset(
    name: str,
    *,
    reward: str = "outcome",
    clip: tuple[float, ...] = (),
    clip_by: RatioUnit | None = None,
    average: AverageName | None = None,
    kl: bool = False,
) -> Callable[[Build], Build]:
    """Register a function of keyword options under a name. The function is unchanged; a run file
    refers to the record `presets[name]`, which has these shared options.

    reward: default of the option `reward`, if the function has a parameter of that name. clip:
    defaults of the options clip_low, clip_high and (optionally) clip_dual of PPO's clip on the
    ratio of current to old policy. clip_by: default of the option clip_by, the unit whose tokens'
    geometric mean is one ratio. average: default of the option average, the units that the loss is
    a mean over ("sum": rows, whose tokens are summed); it comes with the option length, a number of
    tokens to divide by instead of each unit's own. The function then returns no `agg`. kl: add the
    option kl, the coefficient of a k3 KL penalty to the reference.

    Raises ConfigError for the name of one of the library's own presets."""

    def register(function: Build) -> Build:
        record = AlgoPreset(name, function, reward, clip, clip_by, average, kl)
        add_preset(record)
        declared[function] = record
        return function

    return register


def modifier(name: str, *, prefix: str = "", host: str = "grpo") -> Callable[[Build], Build]:
    """Register a function of an Algo and keyword options that applies to any preset as "+name".

    prefix: prepended to its options in a run file, to distinguish them from the preset's. host: the
    preset that the documentation shows it with. Raises ConfigError for the name of one of the
    library's own modifiers."""

    def register(function: Build) -> Build:
        add_modifier(AlgoModifier(name, function, prefix, host))
        return function

    return register


def add_preset(record: AlgoPreset) -> None:
    _check_free(record.name, record.name in preset_names().hosts, record.function)
    presets[record.name] = record


def add_modifier(record: AlgoModifier) -> None:
    _check_free(record.name, record.name in preset_names().modifiers, record.function)
    modifiers[record.name] = record


def _check_free(name: str, in_library: bool, function: Callable[..., Any]) -> None:
    if in_library and not getattr(function, "__module__", "").startswith("agentrl.algorithms."):
        raise ConfigError(
            f"algorithm.preset: {where(function)} hides the library's own {name!r}; choose "
            "another name"
        )


def preset_named(name: str, root: Path = Path()) -> AlgoPreset:
    """A preset of the library, of an installed package, or of the user's file in the folder `root`.
    Raises ConfigError for a function that cannot be loaded or is no preset."""
    names = preset_names()
    library = {*names.hosts, *(f"+{word}" for word in names.modifiers)}
    names_in_process = library | (presets.keys() - plugin_points("presets").names)
    loaded = load_plugin("presets", name, names_in_process, root, key=KEY)
    if loaded is None:
        return presets[name]
    if not callable(loaded):
        check_call(loaded, key=KEY)
    # A decorated function has registered its record; any other has only its own options.
    if isinstance(loaded, Hashable) and loaded in declared:
        return declared[loaded]
    return AlgoPreset(name, loaded)


def modifier_named(name: str) -> AlgoModifier:
    """Raises ConfigError for a function that cannot be loaded."""
    if name in modifiers:
        return modifiers[name]
    function = load_plugin("presets", f"+{name}", (), Path(), key=KEY)
    return modifiers.get(name) or AlgoModifier(name, function)


def outcome_of(algo: Algo) -> str:
    """The first reward that an algorithm reads."""
    return next(iter(rewards_read(algo.credit)), "outcome")
