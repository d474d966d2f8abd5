"""What a person or another tool sees of a run: console, report, OpenTelemetry, metrics sinks."""
