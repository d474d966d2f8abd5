"""Credit of branching rollouts."""
