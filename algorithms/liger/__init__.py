"""Liger Kernel on the model of a learner."""
