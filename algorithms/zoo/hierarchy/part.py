from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.hierarchy"

PART = Part(
    name="zoo hierarchy",
    summary="Credit of two levels: rollouts and calls, subgoals, main and sub-agents.",
    needs=("credit blocks",),
    presets={
        "+hiper": f"{HERE}.presets:hiper",
        "archer": f"{HERE}.presets:archer",
        "hiper": f"{HERE}.presets:hiper",
        "m-grpo": f"{HERE}.presets:m_grpo",
        "mt-grpo": f"{HERE}.presets:mt_grpo",
    },
)
