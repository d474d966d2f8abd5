"""Workspaces: a folder for each attempt, copied from a source, sandboxed, scored and removed."""
