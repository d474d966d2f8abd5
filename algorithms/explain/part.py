from agentrl.base.parts import Part

HERE = "agentrl.algorithms.explain"

PART = Part(
    name="explain",
    summary="Store the credit of each call and explain it; keep batches of failed optimizer steps.",
    outputs=("dumps",),
    commands={"explain": f"{HERE}.command:explain"},
    training={"explain": f"{HERE}.training:join"},
)
