from agentrl.base.parts import Part

PART = Part(
    name="evaluation",
    summary="The held-out score of a checkpoint or of upstreams, after or without training.",
    uses=("checkpoints",),
    commands={"eval": "agentrl.evaluation.checkpoint.command:evaluate"},
)
