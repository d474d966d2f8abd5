from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.critics"

PART = Part(
    name="zoo critics",
    summary="Other critics of calls.",
    needs=("credit blocks",),
    presets={
        "+step-gae": f"{HERE}.presets:agent_r1",
        "+tabular": f"{HERE}.presets:with_tabular",
        "agent-r1": f"{HERE}.presets:agent_r1",
        "pspo": f"{HERE}.presets:pspo",
        "ragen": f"{HERE}.presets:ragen",
        "turn-ppo": f"{HERE}.presets:turn_ppo",
    },
)
