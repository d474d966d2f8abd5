"""Model APIs other than chat completions, on top of chat completions."""
