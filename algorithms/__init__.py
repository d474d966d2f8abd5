"""The learning side: loop, credit, objectives, batching, learners, policy servers.

A preset imports all that it needs from here: `from agentrl.algorithms import Algo, preset`.
"""

from typing import TYPE_CHECKING

from agentrl.core import lazy_attributes

if TYPE_CHECKING:
    from agentrl.algorithms.credit.calls import CallRewards as CallRewards
    from agentrl.algorithms.credit.calls import Ema as Ema
    from agentrl.algorithms.credit.calls import PotentialShaping as PotentialShaping
    from agentrl.algorithms.credit.calls import Returns as Returns
    from agentrl.algorithms.credit.calls import StepGae as StepGae
    from agentrl.algorithms.credit.calls import TurnDiscount as TurnDiscount
    from agentrl.algorithms.credit.core import AllFilters as AllFilters
    from agentrl.algorithms.credit.core import Credit as Credit
    from agentrl.algorithms.credit.core import CriticValues as CriticValues
    from agentrl.algorithms.credit.core import Gae as Gae
    from agentrl.algorithms.credit.core import GroupRelative as GroupRelative
    from agentrl.algorithms.credit.core import RewardToGo as RewardToGo
    from agentrl.algorithms.credit.core import TokenKLPenalty as TokenKLPenalty
    from agentrl.algorithms.credit.core import Whiten as Whiten
    from agentrl.algorithms.credit.core import ZeroAdvantage as ZeroAdvantage
    from agentrl.algorithms.credit.core import rewards as rewards
    from agentrl.algorithms.credit.core import standardise as standardise
    from agentrl.algorithms.credit.core import weighted_sum as weighted_sum
    from agentrl.algorithms.data.batch import Batch as Batch
    from agentrl.algorithms.objective.core import Algo as Algo
    from agentrl.algorithms.objective.core import Average as Average
    from agentrl.algorithms.objective.core import Gate as Gate
    from agentrl.algorithms.objective.core import KLPenalty as KLPenalty
    from agentrl.algorithms.objective.ratios import Clip as Clip
    from agentrl.algorithms.objective.ratios import InRange as InRange
    from agentrl.algorithms.objective.ratios import Ratio as Ratio
    from agentrl.algorithms.objective.ratios import RatioInRange as RatioInRange
    from agentrl.algorithms.objective.ratios import Truncate as Truncate
    from agentrl.algorithms.objective.ratios import TrustRegion as TrustRegion
    from agentrl.algorithms.presets.declare import Discount as Discount
    from agentrl.algorithms.presets.declare import Num as Num
    from agentrl.algorithms.presets.declare import modifier as modifier
    from agentrl.algorithms.presets.declare import preset as preset
    from agentrl.algorithms.presets.registry import make as make

# Imported lazily: torch takes seconds to import, and most commands do not need it.
LAZY = {
    "credit.core": "AllFilters Credit CriticValues Gae GroupRelative RewardToGo TokenKLPenalty "
    "Whiten ZeroAdvantage rewards standardise weighted_sum",
    "credit.calls": "CallRewards Ema PotentialShaping Returns StepGae TurnDiscount",
    "data.batch": "Batch",
    "objective.core": "Algo Average Gate KLPenalty",
    "objective.ratios": "Clip InRange Ratio RatioInRange Truncate TrustRegion",
    "presets.registry": "make",
    "presets.declare": "Discount Num modifier preset",
}
__getattr__ = lazy_attributes(__name__, LAZY)
