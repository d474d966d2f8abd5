"""The store in an SQL database: verbs, their statements, and the writer that commits them."""
