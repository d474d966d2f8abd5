"""The store over HTTP: one table of verbs, a server of any backend, a client that is a Store."""
