"""Credit of the roles of a team: calls compared within a role, or of some roles only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import GroupRelative, Whiten
from agentrl.algorithms.credit.parts import map_records
from agentrl.algorithms.credit_blocks import calls
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.declare import PPO_CLIP, Names, modifier, preset
from agentrl.errors import ConfigError


@preset("dr-mas", usual=True, clip=PPO_CLIP)
def dr_mas(reward: str) -> Algo:
    """Calls compared with those of the same role. arXiv 2602.08847."""
    return Algo(GroupRelative(reward, at="transition", by=("group", "role"), norm="std"))


@modifier("per-role", usual=True)
def per_role(algo: Algo) -> Algo:
    """Restricts every comparison and scale of the host to one role; rollouts count once per role.
    arXiv 2602.08847."""

    def change(part: Any) -> Any:
        if isinstance(part, Whiten):
            return replace(part, by=(*part.by, "role"))
        if not isinstance(part, GroupRelative) or "role" in part.by:
            return part
        level = part.level
        if level == "rollout" and any(map(callable, (part.base, part.w, part.bw))):
            raise ConfigError(
                "algorithm.preset: +per-role cannot split a baseline or weight of whole rollouts; "
                "remove +per-role or choose another preset"
            )
        norm_by = None if part.norm_by is None else (*part.norm_by, "role")
        at = "role" if level == "rollout" else level
        return replace(part, at=at, by=(*part.by, "role"), norm_by=norm_by)

    return replace(algo, credit=map_records(algo.credit, change))


@dataclass(frozen=True, slots=True)
class RoleFilter:
    """Filter for tokens of these roles, bool [N]. Raises TrainingError for a role without calls."""

    roles: tuple[str, ...]

    def __call__(self, batch: Batch) -> Tensor:
        calls.need_roles(batch, self.roles)
        return calls.made_by(batch, self.roles)[batch.token_transition]


@modifier("only", usual=True, prefix="only_")
def only(algo: Algo, *, roles: Names) -> Algo:
    """Trains only the calls of these roles. arXiv 2508.03680."""
    chosen = RoleFilter(tuple(roles))
    keep = chosen if algo.keep is None else core.AllFilters((algo.keep, chosen))
    return replace(algo, keep=keep)
