"""`agentrl view` shows the runs of a store in a browser: curves, groups, rollouts, single tokens.

`server` answers requests, `pages` collects the values of each page, `front` and `versions` those of
a run's first screen, prompt searches and live runs, `summaries` summarises runs; `records` converts
stored records to values for `templates` and notifies open pages of changes; `export` writes a run
as one HTML file and shows it in Jupyter. Nothing here writes to a store or imports torch. Needs the
extra `view`.
"""
