"""The training process: the loop, checkpoints, updates, serving of policies."""
