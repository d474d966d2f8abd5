"""Traces that other tools have recorded: read, show, redact, train on and write them."""
