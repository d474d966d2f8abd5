from agentrl.base.parts import Part

HERE = "agentrl.telemetry.otlp"

PART = Part(
    name="OpenTelemetry",
    summary="Spans from any OpenTelemetry SDK, and traces for Phoenix, Langfuse and Jaeger.",
    commands={"export otlp": f"{HERE}.command:otlp"},
    spans={
        "/v1/traces": f"{HERE}.wire:receive",
        "/v1/logs": f"{HERE}.wire:drop",
        "/v1/metrics": f"{HERE}.wire:drop",
    },
)
