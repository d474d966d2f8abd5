"""Functions of the run file that measure checkpoints."""
