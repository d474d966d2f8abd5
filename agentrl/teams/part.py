from agentrl.base.parts import Part

HERE = "agentrl.teams"

PART = Part(
    name="teams",
    uses=("checkpoints", "evaluation", "evaluation plans"),
    summary="Rewards of a team's roles, and what the training of each role contributes.",
    commands={"ablate": f"{HERE}.command:ablate"},
    libraries={f"{HERE}.rewards": f"{HERE}.rewards:cross"},
)
