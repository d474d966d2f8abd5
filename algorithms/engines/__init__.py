"""Policy servers, which sample from the weights."""
