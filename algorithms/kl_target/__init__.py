"""A KL penalty that adapts."""
