"""Reward models trained on data sets, and their evaluation."""
