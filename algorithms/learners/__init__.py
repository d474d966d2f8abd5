"""Learners, which own the weights and the optimizer."""
