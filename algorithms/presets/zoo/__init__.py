"""Presets: one file per paper or family, with the classes that only it uses."""
