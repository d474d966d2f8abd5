"""Teachers behind a server, whose log-probs a policy imitates."""
