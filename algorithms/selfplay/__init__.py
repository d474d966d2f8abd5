"""Self-play: games of a policy against itself and its snapshots, and cross-play."""
