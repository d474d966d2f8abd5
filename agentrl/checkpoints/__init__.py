"""Checkpoints of a run: to find them on disk, and to go back to one."""
