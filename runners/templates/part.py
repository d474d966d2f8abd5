from agentrl.base.parts import Part

HERE = "agentrl.runners.templates"

PART = Part(
    name="templates",
    summary="Adapt messages to the roles that a policy's chat template renders.",
    gateway={"templates": f"{HERE}.gateway:join"},
)
