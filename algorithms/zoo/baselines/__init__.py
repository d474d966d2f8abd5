"""Other baselines, scales and rewards of groups."""
