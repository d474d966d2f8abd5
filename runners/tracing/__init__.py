"""OpenTelemetry spans, roles and rewards of the attempt that the running code belongs to."""
