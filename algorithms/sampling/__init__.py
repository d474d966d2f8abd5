"""Samples tasks, opponents and branches, requests rollouts, and collects the groups to train."""
