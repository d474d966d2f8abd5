"""Presets and modifiers: algorithms by name."""
