"""All runs of all stores: where they are, what each amounts to, and their list."""
