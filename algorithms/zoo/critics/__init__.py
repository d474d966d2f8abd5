"""Other critics of calls."""
