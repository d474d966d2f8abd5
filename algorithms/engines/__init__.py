"""Policy servers: what samples from the weights."""
