from agentrl.base.parts import Part

PART = Part(
    name="evaluation plans",
    summary="Games of frozen policies, which other parts compare.",
    uses=("checkpoints", "evaluation"),
    commands={"algorithm play": "agentrl.evaluation.plans.command:play_lineups"},
)
