from agentrl.base.parts import Part

HERE = "agentrl.runners.games"

PART = Part(
    name="games",
    summary="Games of OpenSpiel as agents and verifiers.",
    libraries={HERE: f"{HERE}.agent:GameAgent"},
)
