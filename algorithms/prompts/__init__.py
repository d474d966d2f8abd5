"""Prompt search: finds better prompts for unmodified agents."""
