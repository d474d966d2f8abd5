"""Held-out evaluation of checkpoints: alone, against each other, and with roles replaced."""
