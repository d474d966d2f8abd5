"""The store over HTTP: a table of verbs, a server for any backend, and a client."""
