"""Which tasks are rolled out, how often, against which opponents, and which groups are trained."""
