"""All runs of all stores: where they are, their list, and the server of it and of their pages."""
