"""The stored credit of calls, its explanation, and the batches of failed optimizer steps."""
