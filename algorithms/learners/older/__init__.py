"""Learners of packages for an earlier version."""
