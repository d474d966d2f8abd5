"""Metrics, stored credit and explanations of training steps."""
