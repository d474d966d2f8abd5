from agentrl.base.parts import Part

HERE = "agentrl.vision"

PART = Part(
    name="vision",
    summary="Policies that see the images in an agent's messages.",
    tables={"policy.vision": f"{HERE}.table:Vision"},
    checks={"vision": f"{HERE}.table:check"},
    loaders={"vision": f"{HERE}.loading:load"},
    training={"vision": f"{HERE}.training:join"},
)
