from agentrl.base.parts import Part

HERE = "agentrl.algorithms.multiagent"

PART = Part(
    name="multiagent",
    summary="Value learning for teams: episodes of joint actions, VDN and QMIX.",
    presets={
        "coma": f"{HERE}.coma:coma",
    },
)
