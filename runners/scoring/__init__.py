"""Rewards: what verifiers return and what agents report."""
