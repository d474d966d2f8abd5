"""Environments that people already have: plug-ins, and how they are played."""

from typing import TYPE_CHECKING

from agentrl.core import lazy_attributes

if TYPE_CHECKING:
    from agentrl.environments.base import Environment, Episode, EpisodeError
    from agentrl.environments.playing import Endpoint, endpoint, play

__all__ = ["Endpoint", "Environment", "Episode", "EpisodeError", "endpoint", "play"]

LAZY = {
    "base": "Environment Episode EpisodeError",
    "playing": "Endpoint endpoint play",
}
__getattr__ = lazy_attributes(__name__, LAZY)
