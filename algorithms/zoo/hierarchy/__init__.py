"""Credit of two levels: rollouts and calls, subgoals, main and sub-agents."""
