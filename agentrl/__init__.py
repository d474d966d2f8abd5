"""Reinforcement learning for the agents people already have."""

from importlib import import_module
from typing import TYPE_CHECKING

from agentrl.types import Attempt, Reward, Rollout, Scope, Task, Trace, Transition

if TYPE_CHECKING:
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
    "reward",
    "role",
    "show",
]

# Imported late: `import agentrl` stays fast in every agent process.
LATE = {
    "Trainer": "agentrl.trainer",
    "reward": "agentrl.runners.scoring.rewards",
    "role": "agentrl.runners.tracing.roles",
    "show": "agentrl.view.notebook",
}


def __getattr__(name: str) -> object:
    if name in LATE:
        return getattr(import_module(LATE[name]), name)
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
