"""Algorithms by name."""
