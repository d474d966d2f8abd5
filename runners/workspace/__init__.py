"""A folder for each attempt: made from a source, confined, scored, removed."""
