"""Credit of calls from calls in the same state."""
