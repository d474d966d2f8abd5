"""Tasks by how often they were solved."""
