"""Rewards of verifiers and agents."""
