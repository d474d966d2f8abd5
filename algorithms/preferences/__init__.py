"""Data sets: pairs, labels and demonstrations from stored rollouts or files."""
