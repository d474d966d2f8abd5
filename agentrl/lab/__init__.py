"""The lab: presets compared on tasks, the time of a run predicted, a preset advised."""
