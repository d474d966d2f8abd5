"""Coding harnesses as agents: their presets, and the check behind `agentrl harness`."""
