"""`agentrl view` shows the runs of a store in a browser: curves, groups, rollouts, single tokens.

`server` answers requests, `pages` collects the values of each page, `records` converts stored
records to values for templates, `live` notifies open pages of changes, `export` writes a run as one
HTML file and `notebook` shows it in Jupyter. Nothing here writes to a store or imports torch. Needs
the extra `view`.
"""
