"""More losses of pairs."""
