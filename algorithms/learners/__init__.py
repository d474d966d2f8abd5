"""Learners: they own the weights and the optimizer."""
