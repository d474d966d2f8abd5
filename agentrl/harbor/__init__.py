"""Harbor's tasks, run in their containers."""
