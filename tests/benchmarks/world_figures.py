"""What presets make of worlds whose policy gradient is known; part of `tests.benchmarks.credit`.

The ratio is the mean squared error of the gradient, scaled to a share of 1, over that of RLOO on
the same batches, for a group of 16 and for 8 groups of 8. As in a run, a preset remembers earlier
batches, which are of the same policy here; "auto alone" is the default without a memory. The
standard error of a ratio is a jackknife over the batches. No ratio is above `CAP`, which also
stands for a share that is not positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from agentrl.algorithms.credit.core import Credit, GroupRelative, nested_records
from agentrl.algorithms.credit.states import GrpoScale
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.state import RememberedColumn
from agentrl.algorithms.presets.registry import make

from . import held_out_worlds, world_list
from .worlds import Array, Compiled, World, estimates, figures, samples

SIZES = ((1, 16), (8, 8))
DEFAULT, ALONE = "auto", "auto alone"
PRESETS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "peers": {},
    ALONE: {},
    "grpo": {},
    "gigpo": {},
    "hgpo": {},
    "batch-td": {},
    "agent-r1": {"value": "transition:value"},  # a perfect critic
}
OFTEN = (DEFAULT, "peers", ALONE, "grpo")  # the others get a third of the batches
CAP = 1e6
RLOO = GroupRelative("outcome", base="loo")


def credit_of(name: str, world: World) -> Credit:
    """The credit of a preset, without a memory."""
    reward = "transition:process" if world.process else "outcome"
    if name == "grpo":  # has no rewards of calls
        return make(name, {}).credit
    return make(name.split()[0], {"reward": reward, **PRESETS[name]}).credit


def remembering(credit: Credit) -> Credit:
    """The credit of one batch after the other, as a run has it."""
    memories = {
        part.name: part for part in nested_records(credit) if isinstance(part, RememberedColumn)
    }
    state = {name: memory.part(0) for name, memory in memories.items()}

    def of_next(batch: Batch) -> Tensor:
        read = {name: memory.recall(state[name], batch, ()) for name, memory in memories.items()}
        state.update({name: after for name, (_, after) in read.items()})
        return credit(
            replace(batch, remembered={name: column for name, (column, _) in read.items()})
        )

    return of_next


def credits_of(world: World, names: Sequence[str]) -> dict[str, Credit]:
    """The credit of `auto` is that of `peers` on another scale, so that is computed once."""
    found, known = {name: credit_of(name, world) for name in names}, dict[int, Tensor]()
    scaled = found.get(DEFAULT)
    found = {name: credit if name == ALONE else remembering(credit)
             for name, credit in found.items()}  # fmt: skip
    if scaled is not None and "peers" in found:
        peers = found["peers"]
        assert isinstance(scaled, GrpoScale)

        def once(batch: Batch) -> Tensor:
            name = id(batch.token_row)  # which a batch shares with itself without a memory
            if name not in known:
                known[name] = peers(batch)
            return known[name]

        found |= {"peers": once, DEFAULT: remembering(replace(scaled, credit=once))}
    return found


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
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Figures by size and preset; None where there is no number."""
    compiled = Compiled(world)
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for groups, size in SIZES:
        sampled = samples(compiled, groups, size, batches, seed)
        base = estimates(RLOO, compiled, sampled)
        here = found[f"{groups} x {size}"] = {}
        for name, credit in credits_of(world, names).items():
            count = batches if name in OFTEN else max(batches // 3, 10)
            gradients = estimates(credit, compiled, sampled[:count])
            seen = figures(gradients, compiled.exact)
            ratio, error = compared(gradients, base, compiled.exact)
            numbers = {"share": seen.share, "bias": seen.bias, "variance": seen.variance,
                       "ratio": ratio, "standard error": error}  # fmt: skip
            here[name] = {key: x if np.isfinite(x) else None for key, x in numbers.items()}
    return found


def summary(found: dict[str, Any], worlds: Sequence[World]) -> dict[str, Any]:
    """The largest ratio of the default, also where states recur and tell the truth, and to GRPO."""
    each = {(world, size): presets
            for world, sizes in found.items() for size, presets in sizes.items()}  # fmt: skip
    ratios, errors = ({at: presets[DEFAULT][key] for at, presets in each.items()}
                      for key in ("ratio", "standard error"))  # fmt: skip
    honest = {world.name for world in worlds if world.recurring}
    bare = {at: presets["peers"]["ratio"] for at, presets in each.items()}
    among = {
        "minimax": ratios,
        "minimax less two standard errors": {at: ratios[at] - 2 * errors[at] for at in each},
        "minimax over grpo": {at: ratios[at] / each[at]["grpo"]["ratio"] for at in each},
        "minimax peers": bare,
        "recurring": {at: ratio for at, ratio in ratios.items() if at[0] in honest},
        "recurring peers": {at: ratio for at, ratio in bare.items() if at[0] in honest},
    }
    result: dict[str, Any] = {}
    for key, found_there in among.items():
        at = max(found_there, key=found_there.__getitem__)
        result |= {key: found_there[at], f"{key} world": ", ".join(at)}
    mean = np.log(list(among["recurring"].values())).mean()
    return result | {"recurring mean": float(np.exp(mean))}


def measure(batches: int) -> dict[str, Any]:
    worlds = [*world_list.all_worlds(), *held_out_worlds.all_worlds()]
    found = {world.name: of_world(world, tuple(PRESETS), batches) for world in worlds}
    return {**summary(found, worlds), "worlds": found}


def table(found: dict[str, Any]) -> str:
    """A line for each world and size: share and ratio of each preset."""
    lines = []
    for world, sizes in found.items():
        for size, each in sizes.items():
            cells = [f"{x['share'] or np.nan:.2f} {x['ratio']:.3g}" for x in each.values()]
            lines.append("  ".join([f"{world:<30}{size:<8}", *(f"{cell:>12}" for cell in cells)]))
    names = next(iter(next(iter(found.values())).values()))
    head = "  ".join([f"{'share and ratio':<38}", *(f"{name:>12}" for name in names)])
    return "\n".join([head, *lines])
