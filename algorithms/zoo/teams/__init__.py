"""Credit and averages for teams and self-play."""
