"""Learners: what holds the weights and the optimizer."""
