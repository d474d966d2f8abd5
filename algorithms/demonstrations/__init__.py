"""Demonstrations: a policy imitates them before its first step, and a stronger model makes them."""
