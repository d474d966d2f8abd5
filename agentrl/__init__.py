"""Reinforcement learning for the agents people already have."""

from agentrl.types import Attempt, Reward, Rollout, Task, Transition

__version__ = "0.1.0"
__all__ = ["Attempt", "Reward", "Rollout", "Task", "Trainer", "Transition", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Trainer":  # imported late: `import agentrl` stays fast in every agent process
        from agentrl.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
