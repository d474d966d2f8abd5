"""Data sets: pairs, labels and demonstrations of stored rollouts or of files."""
