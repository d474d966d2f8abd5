"""Environments that people already have: plug-ins, and how they are played."""

from typing import TYPE_CHECKING

from agentrl.base.late import late

if TYPE_CHECKING:
    from agentrl.environments.base import Environment, Episode, EpisodeError
    from agentrl.environments.endpoints import Endpoint, endpoint
    from agentrl.environments.playing import play

__all__ = ["Endpoint", "Environment", "Episode", "EpisodeError", "endpoint", "play"]

LATE = {
    "base": "Environment Episode EpisodeError",
    "endpoints": "Endpoint endpoint",
    "playing": "play",
}
__getattr__ = late(__name__, LATE)
