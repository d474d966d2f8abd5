from agentrl.base.parts import Part

PART = Part(
    name="doctor",
    summary="Checks of this machine and of everything that a run would rely on.",
    uses=("evaluation", "preflight"),
    commands={"doctor": "agentrl.doctor.command:doctor"},
    starts={"doctor": "agentrl.doctor.machine:check_at_start"},
)
