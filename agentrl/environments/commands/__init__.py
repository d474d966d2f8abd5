"""`agentrl env`."""
