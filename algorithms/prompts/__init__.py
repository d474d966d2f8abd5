"""Prompt searches: better texts for unmodified agents."""
