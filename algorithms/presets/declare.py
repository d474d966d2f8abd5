"""Declare an algorithm: a preset is a function of keyword options that returns an `Algo`, a
modifier a function of an Algo and options that returns another.

`@preset` and `@modifier` write a record into a table and leave the function as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

from agentrl.algorithms.credit.core import Credit
from agentrl.algorithms.credit.records import rewards_read
from agentrl.algorithms.objective.core import Algo, Gate, KLPenalty
from agentrl.algorithms.objective.ratios import Clip
from agentrl.config.presets import preset_names
from agentrl.errors import ConfigError
from agentrl.plugins import check_call, load_plugin, plugin_points, where

# Types of options.
Num = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Discount = Annotated[float, msgspec.Meta(ge=0, le=1)]
Cap = Annotated[float, msgspec.Meta(gt=0)]  # inf: no cap
Share = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Mix = Annotated[dict[str, Share], msgspec.Meta(min_length=1)]  # reward name to weight
CreditFunction = Annotated[Credit, "file.py:name"]  # from a batch to advantages [N]
Names = Annotated[list[str], msgspec.Meta(min_length=1)]
Scale = Literal["none", "std"]

KEY = "algorithm.preset"
PPO_CLIP = (0.2, 0.2)
EMPTY = inspect.Parameter.empty
ONLY = inspect.Parameter.KEYWORD_ONLY
Build = TypeVar("Build", bound=Callable[..., Any])


class Option(NamedTuple):
    kind: Any
    default: Any  # EMPTY: required


def options_of_function(function: Callable[..., Any]) -> dict[str, Option]:
    """The keyword-only parameters that have a type."""
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is ONLY and name in hints:
            found[name] = Option(hints[name], parameter.default)
    return found


@dataclass(frozen=True, slots=True)
class AlgoPreset:
    """A function of keyword options, and the shared options that it asks for: see `preset`."""

    name: str
    function: Callable[..., Any]
    reward: str = "outcome"
    clip: tuple[float, ...] = ()
    clip_by: Literal["transition", "row"] | None = None
    kl: bool = False
    usual: bool = False  # whether it is in the short list

    def options(self) -> dict[str, Option]:
        """Type and default of each option, as a run file may set them. Raises ConfigError for a
        parameter that can be no option."""
        own = options_of_function(self.function)
        for name, parameter in inspect.signature(self.function).parameters.items():
            if name not in own and not (name == "reward" and self._takes_reward()):
                raise ConfigError(
                    f"algorithm.preset: the parameter {parameter.name!r} of "
                    f"{where(self.function)} is no keyword-only option with a type; write "
                    "def name(*, option: float = 0.5) -> Algo"
                )
        return self._with_shared(own)

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.function) or ""

    def build(self, **options: Any) -> Algo:
        """The algorithm. Raises ConfigError if the function returns something else."""
        shared = {"reward": self.reward} if self._takes_reward() else {}
        own = {name: x for name, x in options.items() if name not in ("kl", *self._bounds())}
        algo = self.function(**shared | own)
        if not isinstance(algo, Algo):
            raise ConfigError(
                f"algorithm.preset: {where(self.function)} returned {type(algo).__name__}, which "
                "is no Algo; return Algo(...) instead"
            )
        return self._shared(algo, options)

    def _shared(self, algo: Algo, options: Mapping[str, Any]) -> Algo:
        """`algo` with PPO's clip and the KL penalty."""
        if bounds := self._bounds():
            limits = [options.get(name, default) for name, default in bounds.items()]
            algo = replace(algo, gates=(Gate(Clip(*limits), by=self.clip_by), *algo.gates))
        beta = options.get("kl", 0.0) if self.kl else 0.0
        return replace(algo, penalties=(KLPenalty("k3", beta), *algo.penalties)) if beta else algo

    def _with_shared(self, own: dict[str, Option]) -> dict[str, Option]:
        reward = {"reward": Option(str, self.reward)} if self._takes_reward() else {}
        kinds = {"clip_low": Num, "clip_high": Num, "clip_dual": Cap}
        clip = {name: Option(kinds[name], x) for name, x in self._bounds().items()}
        return reward | own | clip | ({"kl": Option(Num, 0.0)} if self.kl else {})

    def _takes_reward(self) -> bool:
        parameter = inspect.signature(self.function).parameters.get("reward")
        return parameter is not None and parameter.kind is not ONLY

    def _bounds(self) -> dict[str, float]:
        return dict(zip(("clip_low", "clip_high", "clip_dual"), self.clip, strict=False))


@dataclass(frozen=True, slots=True)
class AlgoModifier:
    """A function of an Algo and keyword options. prefix: of its options in a run file. host: the
    preset to show it with. credit_only: the function is a preset's, of a reward and options; its
    credit replaces the host's."""

    name: str
    function: Callable[..., Algo]
    prefix: str = ""
    host: str = "grpo"
    credit_only: bool = False
    usual: bool = False  # whether it is in the short list

    def options(self) -> dict[str, Option]:
        own = options_of_function(self.function)
        return {self.prefix + name: option for name, option in own.items()}

    @property
    def doc(self) -> str:
        said = inspect.getdoc(self.function) or ""
        return f"Instead of the host's credit: {said}" if self.credit_only else said

    def build(self, algo: Algo, **options: Any) -> Algo:
        given = {name.removeprefix(self.prefix): x for name, x in options.items()}
        if self.credit_only:
            return replace(algo, credit=self.function(outcome_of(algo), **given).credit)
        return self.function(algo, **given)


presets: dict[str, AlgoPreset] = {}
# Also by function: two files may use one name.
declared: dict[Callable[..., Any], AlgoPreset] = {}
modifiers: dict[str, AlgoModifier] = {}


def preset(
    name: str,
    *,
    reward: str = "outcome",
    clip: tuple[float, ...] = (),
    clip_by: Literal["transition", "row"] | None = None,
    kl: bool = False,
    usual: bool = False,
) -> Callable[[Build], Build]:
    """Register a function of keyword options under a name. The function stays as it is; what a run
    file names is the record `presets[name]`, with these shared options.

    reward: default of the option `reward`, if the function has a parameter of that name. clip:
    defaults of the options clip_low, clip_high and (optionally) clip_dual of PPO's clip on the
    ratio of current to old policy, pooled over each `clip_by`. kl: add the option kl, the
    coefficient of a k3 KL penalty to the reference. usual: show it in the short list.

    Raises ConfigError for the name of one of the library's own presets."""

    def register(function: Build) -> Build:
        add_preset(AlgoPreset(name, function, reward, clip, clip_by, kl, usual))
        return function

    return register


def modifier(
    name: str, *, prefix: str = "", host: str = "grpo", usual: bool = False
) -> Callable[[Build], Build]:
    """Register a function of an Algo and keyword options that applies to any preset as "+name".

    prefix: prepended to its options in a run file, to tell them from the preset's. host: the preset
    to show it with. usual: show it in the short list. Raises ConfigError for the name of one of the
    library's own modifiers."""

    def register(function: Build) -> Build:
        _add_modifier(AlgoModifier(name, function, prefix, host, usual=usual))
        return function

    return register


def as_modifier(name: str, *, prefix: str, usual: bool = False) -> Callable[[Build], Build]:
    """Also register a preset's function as a modifier that replaces the host's credit by the
    preset's, computed from the host's reward. Its options are the preset's own, with a prefix."""

    def register(function: Build) -> Build:
        _add_modifier(AlgoModifier(name, function, prefix, credit_only=True, usual=usual))
        return function

    return register


def add_preset(made: AlgoPreset) -> None:
    _check_free(made.name, made.name in preset_names().presets, made.function)
    presets[made.name] = declared[made.function] = made


def _add_modifier(made: AlgoModifier) -> None:
    _check_free(made.name, made.name in preset_names().modifiers, made.function)
    modifiers[made.name] = made


def _check_free(name: str, own: bool, function: Callable[..., Any]) -> None:
    if own and not getattr(function, "__module__", "").startswith("agentrl.algorithms."):
        raise ConfigError(
            f"algorithm.preset: {where(function)} hides the library's own {name!r}; choose "
            "another name"
        )


def preset_named(name: str, root: Path = Path()) -> AlgoPreset:
    """A preset of the library, of an installed package, or of the user's file in the folder `root`.
    Raises ConfigError for a function that cannot be loaded or is no preset."""
    names = preset_names()
    library = {*names.presets, *(f"+{word}" for word in names.modifiers)}
    own = library | (presets.keys() - plugin_points("presets").names)
    thing = load_plugin("presets", name, own, root, key=KEY)
    if thing is None:
        return presets[name]
    if not callable(thing):
        check_call(thing, key=KEY)
    # A decorated function has written its record; any other has its own options only.
    if isinstance(thing, Hashable) and thing in declared:
        return declared[thing]
    return AlgoPreset(name, thing)


def modifier_named(name: str) -> AlgoModifier:
    """Raises ConfigError for a function that cannot be loaded."""
    if name in modifiers:
        return modifiers[name]
    function = load_plugin("presets", f"+{name}", (), Path(), key=KEY)
    return modifiers.get(name) or AlgoModifier(name, function)


def outcome_of(algo: Algo) -> str:
    """The first reward that an algorithm reads."""
    return next(iter(rewards_read(algo.credit)), "outcome")
