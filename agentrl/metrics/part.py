from agentrl.base.parts import Part

PART = Part(
    name="metrics",
    summary="The metrics of a run as a table, CSV or JSON.",
    commands={"metrics": "agentrl.metrics.command:metrics"},
)
