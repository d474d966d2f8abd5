from agentrl.base.parts import Part

HERE = "agentrl.algorithms.curriculum"

PART = Part(
    name="curriculum",
    summary="Choose training tasks by how often they were solved.",
    training={"tasks.order": f"{HERE}.training:join"},
)
