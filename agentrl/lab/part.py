from agentrl.base.parts import Part

PART = Part(
    name="lab",
    summary="List and compare presets, get advice on one, and estimate the time of a run.",
    commands={
        "algorithms": "agentrl.lab.command:algorithms",
        "bench": "agentrl.lab.command:bench",
        "plan": "agentrl.lab.command:plan",
    },
    estimates={"time": "agentrl.lab.duration:duration"},
)
