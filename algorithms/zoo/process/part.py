from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.process"

PART = Part(
    name="zoo process",
    summary="Process rewards beside outcomes.",
    needs=("credit blocks",),
    presets={
        "+process": f"{HERE}.mixing:with_process",
        "istar": f"{HERE}.presets:istar",
        "prime": f"{HERE}.presets:prime",
        "streams": f"{HERE}.mixing:streams",
    },
)
