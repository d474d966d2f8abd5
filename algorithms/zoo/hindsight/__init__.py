"""Credit of calls in hindsight."""
