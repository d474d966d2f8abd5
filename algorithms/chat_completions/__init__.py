"""Chat completions outside of rollouts."""
