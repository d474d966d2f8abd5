from agentrl.base.parts import Part

HERE = "agentrl.tiny"

PART = Part(
    name="tiny",
    summary="Tiny models that imitate given conversations, for examples without a download.",
    libraries={HERE: f"{HERE}.models:imitator"},
)
