"""OpenTelemetry spans, roles and rewards of the current attempt."""
