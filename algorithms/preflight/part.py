from agentrl.base.parts import Part

HERE = "agentrl.algorithms.preflight"

PART = Part(
    name="preflight",
    summary="Estimate the memory of a run, and prove its packing, before the first step.",
    training={"preflight": f"{HERE}.training:join"},
    forecasts={"preflight": f"{HERE}.training:forecast"},
)
