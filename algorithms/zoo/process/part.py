from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.process"

PART = Part(
    name="zoo process",
    summary="Process rewards beside outcomes.",
    presets={
        "istar": f"{HERE}.presets:istar",
        "prime": f"{HERE}.presets:prime",
    },
)
