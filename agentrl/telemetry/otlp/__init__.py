"""OpenTelemetry traces from others and for others."""
