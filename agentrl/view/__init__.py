"""A browser window on the runs of a store: curves, groups, rollouts and single tokens.

`server` answers requests, `pages` collects what each page shows, `records` turns stored records
into what the templates draw, `live` tells open pages that something changed, `export` writes a
run as one HTML file and `notebook` shows it in Jupyter. Nothing here writes to a store or imports
torch. Needs the extra `view`.
"""
