"""Batches: calls, the ids that group them, rewards, and state that outlives a step."""
