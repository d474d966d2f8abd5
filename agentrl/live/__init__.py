"""Live runs: a policy that learns from the sessions that it serves. See README.md."""
