"""Reward models: models whose scores are rewards, and their training."""
