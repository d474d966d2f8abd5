"""Evaluation of a trained run."""
