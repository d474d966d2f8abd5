"""What presets make of worlds whose policy gradient is known; part of `tests.benchmarks.credit`.

The ratio is the mean squared error of the gradient, scaled to a share of 1, over that of RLOO on
the same batches, for a group of 16 and for 8 groups of 8. Its standard error is a jackknife over
the batches. No ratio is above `CAP`, which also stands for a share that is not positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentrl.algorithms.credit.core import Credit, GroupRelative
from agentrl.algorithms.presets.catalogue import make

from . import held_out_worlds, world_list
from .worlds import Array, Compiled, World, estimates, figures, samples

SIZES = ((1, 16), (8, 8))
DEFAULT = "auto"
PRESETS: dict[str, dict[str, Any]] = {
    "auto": {},
    "peers": {},
    "grpo": {},
    "gigpo": {},
    "hgpo": {},
    "batch-td": {},
    "agent-r1": {"value": "transition:value"},  # a perfect critic
}
OFTEN = ("auto", "grpo")  # the others get a third of the batches
CAP = 1e6
RLOO = GroupRelative("outcome", base="loo")


def credit_of(name: str, world: World) -> Credit:
    reward = "transition:process" if world.process else "outcome"
    if name == "grpo":  # has no rewards of calls
        return make(name, {}).credit
    return make(name, {"reward": reward, **PRESETS[name]}).credit


def errors(gradients: Array, exact: Array) -> Callable[[Array], Array]:
    """The error as a function of weights of batches [..., B]: that of `figures`, as it is the mean
    of squares over the square of the mean share, minus 1."""
    squares, along = (gradients**2).sum(1), gradients @ exact.reshape(-1)
    size = float((exact**2).sum())

    def error(weights: Array) -> Array:
        if not size:
            return weights @ squares
        share = (weights @ along) / size
        found = (weights @ squares) / size / np.maximum(share, 1e-9) ** 2 - 1
        return np.where(share > 0, found, np.inf)

    return error


def compared(gradients: Array, base: Array, exact: Array) -> tuple[float, float]:
    """Ratio of the errors and its standard error."""
    count = len(gradients)
    one, other = errors(gradients, exact), errors(base[:count], exact)

    def ratio(weights: Array) -> Array:
        return np.minimum(one(weights) / other(weights), CAP)

    without = (1 - np.eye(count)) / (count - 1)
    each = ratio(without)
    spread = (count - 1) * float(((each - each.mean()) ** 2).mean())
    return float(ratio(np.full(count, 1 / count))), spread**0.5


def of_world(
    world: World, names: Sequence[str], batches: int, seed: int = 1
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by size and preset."""
    compiled = Compiled(world)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for groups, size in SIZES:
        sampled = samples(compiled, groups, size, batches, seed)
        base = estimates(RLOO, compiled, sampled)
        here = found[f"{groups} x {size}"] = {}
        for name in names:
            count = batches if name in OFTEN else max(batches // 3, 10)
            gradients = estimates(credit_of(name, world), compiled, sampled[:count])
            seen = figures(gradients, compiled.exact)
            ratio, error = compared(gradients, base, compiled.exact)
            here[name] = {"share": seen.share, "bias": seen.bias, "variance": seen.variance,
                          "ratio": ratio, "standard error": error}  # fmt: skip
    return found


def summary(found: dict[str, Any], worlds: Sequence[World]) -> dict[str, Any]:
    """The largest ratio of the default, and its ratios where states recur and tell the truth."""
    ratios = {(world, size): each[DEFAULT]["ratio"]
              for world, sizes in found.items() for size, each in sizes.items()}  # fmt: skip
    honest = {world.name for world in worlds if world.recurring}
    recurring = {at: ratio for at, ratio in ratios.items() if at[0] in honest}
    result: dict[str, Any] = {}
    for key, among in (("minimax", ratios), ("recurring", recurring)):
        if among:
            at = max(among, key=among.__getitem__)
            result |= {key: among[at], f"{key} world": ", ".join(at)}
            result[f"{key} standard error"] = found[at[0]][at[1]][DEFAULT]["standard error"]
    if recurring:
        result["recurring mean"] = float(np.exp(np.log(list(recurring.values())).mean()))
    return result


def measure(batches: int, names: Sequence[str] = tuple(PRESETS)) -> dict[str, Any]:
    worlds = [*world_list.all_worlds(), *held_out_worlds.all_worlds()]
    found = {world.name: of_world(world, names, batches) for world in worlds}
    return {**summary(found, worlds), "worlds": found}


def table(found: dict[str, Any]) -> str:
    """A line for each world and size: share and ratio of each preset."""
    lines = []
    for world, sizes in found.items():
        for size, each in sizes.items():
            cells = [f"{x['share']:.2f} {x['ratio']:.3g}" for x in each.values()]
            lines.append("  ".join([f"{world:<30}{size:<8}", *(f"{cell:>12}" for cell in cells)]))
    names = next(iter(next(iter(found.values())).values()))
    head = "  ".join([f"{'share and ratio':<38}", *(f"{name:>12}" for name in names)])
    return "\n".join([head, *lines])
