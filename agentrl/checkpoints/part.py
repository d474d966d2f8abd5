from agentrl.base.parts import Part

HERE = "agentrl.checkpoints"

PART = Part(
    name="checkpoints",
    summary="Resume a run from one of its earlier checkpoints.",
    restarts={"train --from": f"{HERE}.restart:go_back"},
)
