"""Agents in processes of their own: warm pools, and commands."""
