from agentrl.base.parts import Part

HERE = "agentrl.traces"

PART = Part(
    name="traces",
    summary="Print a rollout, and a success and a failure in the report of a run.",
    commands={"show": f"{HERE}.command:show"},
    examples={"last": f"{HERE}.examples:printed"},
)
