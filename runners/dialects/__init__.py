"""The formats in which agents call models, and the conversations that their calls make up."""

from agentrl.runners.dialects.base import Dialect, Translation, UntranslatableError

__all__ = ["Dialect", "Translation", "UntranslatableError"]
