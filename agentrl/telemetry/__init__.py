"""Output of a run for people and other tools: console, report, OpenTelemetry, metrics sinks."""
