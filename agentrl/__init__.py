"""Reinforcement learning for the agents people already have."""

from typing import TYPE_CHECKING

from agentrl.base.late import late
from agentrl.types import Attempt, Reward, Rollout, Scope, Task, Trace, Transition

if TYPE_CHECKING:
    from agentrl.environments.endpoints import endpoint
    from agentrl.runners.scoring.rewards import reward
    from agentrl.runners.tracing.roles import role
    from agentrl.trainer import Trainer
    from agentrl.view.notebook import show

__version__ = "0.1.0"
__all__ = [
    "Attempt",
    "Reward",
    "Rollout",
    "Scope",
    "Task",
    "Trace",
    "Trainer",
    "Transition",
    "__version__",
    "endpoint",
    "reward",
    "role",
    "show",
]

# Imported late: `import agentrl` stays fast in every agent process.
LATE = {
    "environments.endpoints": "endpoint",
    "trainer": "Trainer",
    "runners.scoring.rewards": "reward",
    "runners.tracing.roles": "role",
    "view.notebook": "show",
}
__getattr__ = late(__name__, LATE)
