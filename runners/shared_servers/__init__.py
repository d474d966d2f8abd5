"""Servers and queues that an agent shares with others belong to no attempt."""
