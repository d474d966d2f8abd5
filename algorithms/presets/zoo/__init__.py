"""The algorithms by name: one file per paper or family, with the classes that only it uses."""
