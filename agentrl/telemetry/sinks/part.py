from agentrl.base.parts import Part

HERE = "agentrl.telemetry.sinks"

PART = Part(
    name="sinks",
    summary="Metrics in TensorBoard, Weights & Biases, MLflow, trackio or your own code.",
    outputs=("metrics", "tensorboard", "wandb", "mlruns", "curve.png"),
    tables={"metrics": f"{HERE}.table:MetricsConfig"},
    commands={"sink": f"{HERE}.command:sink"},
    checks={"metrics.sinks": f"{HERE}.base:check_sinks"},
    beside={"sinks": f"{HERE}.process:sinks_process"},
    files={"curve": f"{HERE}.curve:save_curve"},
    follows={"callbacks": f"{HERE}.callbacks:followed"},
    sinks={
        name: f"{HERE}.{name}:open_sink" for name in ("mlflow", "tensorboard", "trackio", "wandb")
    },
)
