"""`agentrl metrics`: the metrics of a run, as a table, CSV or JSON."""
