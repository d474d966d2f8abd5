from agentrl.base.parts import Part

PART = Part(
    name="lab",
    summary="Compare presets on tasks, estimate the time of a run, and get advice on its preset.",
    commands={
        "bench": "agentrl.lab.command:bench",
        "plan": "agentrl.lab.command:plan",
        "algorithms advise": "agentrl.lab.command:advise",
    },
    estimates={"time": "agentrl.lab.duration:duration"},
)
