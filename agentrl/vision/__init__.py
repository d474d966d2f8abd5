"""Agents that look: images in messages, kept once and named by their digests."""
