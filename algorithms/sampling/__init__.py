"""Which tasks are rolled out, how often, against whom, and which groups a step trains on."""
