"""Which version of a live run answers which sessions: comparison, guard, decisions, the page."""
