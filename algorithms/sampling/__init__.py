"""Sampling: tasks, opponents and branches, requests for rollouts, and the groups to train."""
