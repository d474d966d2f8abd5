from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.hindsight"

PART = Part(
    name="zoo hindsight",
    summary="Credit of calls in hindsight.",
    needs=("credit blocks",),
    presets={
        "+hcapo": f"{HERE}.presets:with_hcapo",
        "hcapo": f"{HERE}.presets:hcapo",
    },
    added_rewards={"transition:hindsight": f"{HERE}.presets:add_hindsight"},
)
