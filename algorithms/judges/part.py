from agentrl.base.parts import Part

HERE = "agentrl.algorithms.judges"

PART = Part(
    name="judges",
    summary="Models whose verdicts on rollouts are rewards.",
    uses=("chat-completions",),
    tables={"judges": f"{HERE}.table:JUDGES"},
    training={"judges": f"{HERE}.training:join"},
)
