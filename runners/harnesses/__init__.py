"""Coding harnesses that run as agents: presets, and what `agentrl harness` does with them."""
