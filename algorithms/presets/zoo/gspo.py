"""GSPO and its relatives: one importance ratio per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.objective.core import Algo, Gate
from agentrl.algorithms.objective.ratios import Ratio
from agentrl.algorithms.presets.registry import ROW_SUMS, Num, preset

SEQUENCE_CLIP = (3e-4, 4e-4)  # of a ratio that is the mean of a row's


@dataclass(frozen=True, slots=True)
class ClipLog:
    """lr held below hi where A >= 0 and above -lo elsewhere: what GMPO (arXiv 2507.20673) does to
    each token before it pools them. For `Gate.pre`: gives log-ratios, not factors."""

    lo: float = 0.4
    hi: float = 0.4

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        return torch.where(advantage >= 0, lr.clamp(max=self.hi), lr.clamp(min=-self.lo))


@preset("gspo", clip=SEQUENCE_CLIP, clip_by="row")
def gspo(reward: str) -> Algo:
    """GRPO with one ratio per row, the geometric mean of its tokens'. arXiv 2507.18071."""
    return Algo(GroupRelative(reward, norm="std"))


@preset("gspo-token", clip=SEQUENCE_CLIP, clip_by="row")
def gspo_token(reward: str) -> Algo:
    """GSPO's ratio with credit that may differ inside a row: calls compared by a reward of their
    own, as in `reward = "transition:name"`. arXiv 2507.18071."""
    return Algo(GroupRelative(reward, norm="std"))


@preset("luspo", clip=SEQUENCE_CLIP, clip_by="row")
def luspo(reward: str) -> Algo:
    """GSPO with row sums, free of the bias to short answers. arXiv 2602.05261."""
    return Algo(GroupRelative(reward, norm="std"), agg=ROW_SUMS)


@preset("gmpo")
def gmpo(reward: str, *, log_low: Num = 0.4, log_high: Num = 0.4) -> Algo:
    """GRPO with the geometric mean of a row's ratios, clipped per token. arXiv 2507.20673."""
    gate = Gate(Ratio(), by="row", pre=ClipLog(log_low, log_high))
    return Algo(GroupRelative(reward, norm="std"), (gate,))
