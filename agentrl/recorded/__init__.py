"""Traces that other tools have recorded: to read, look at, redact, train on and write."""
