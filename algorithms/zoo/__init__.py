"""Algorithms beyond those of `presets/`, by family: parts, registered by entry points."""
