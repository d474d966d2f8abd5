"""Reinforcement learning for the agents people already have."""

from typing import TYPE_CHECKING

from agentrl.core import lazy_attributes
from agentrl.core.types import Attempt, Reward, Rollout, Scope, Task, Trace, Transition

if TYPE_CHECKING:
    from agentrl.environments.playing import endpoint
    from agentrl.runners.scoring import reward
    from agentrl.runners.tracing.attempt_log import role
    from agentrl.trainer import Trainer
    from agentrl.view.export import show

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

# Imported lazily: `import agentrl` stays fast in every agent process.
LAZY = {
    "environments.playing": "endpoint",
    "trainer": "Trainer",
    "runners.scoring": "reward",
    "runners.tracing.attempt_log": "role",
    "view.export": "show",
}
__getattr__ = lazy_attributes(__name__, LAZY)
