from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.states"

PART = Part(
    name="zoo states",
    summary="Credit of calls from calls in the same state.",
    presets={
        "+batch-td": f"{HERE}.presets:batch_td",
        "+gigpo": f"{HERE}.presets:with_gigpo",
        "+hgpo": f"{HERE}.presets:hgpo",
        "batch-td": f"{HERE}.presets:batch_td",
        "gigpo": f"{HERE}.presets:gigpo",
        "hgpo": f"{HERE}.presets:hgpo",
    },
)
