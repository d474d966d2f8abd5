from agentrl.base.parts import Part

HERE = "agentrl.vision"

PART = Part(
    name="vision",
    summary="Policies that see the images in an agent's messages.",
    uses=("preflight", "tiny"),
    tables={"images": f"{HERE}.table:ImagesConfig", "policy.vision": f"{HERE}.table:Vision"},
    memory={"vision": f"{HERE}.memory:needed"},
    loaders={"vision": f"{HERE}.loading:load"},
    training={"vision": f"{HERE}.training:join"},
    media={"images": f"{HERE}.rows:stored"},
    gateway={"vision": f"{HERE}.gateway:StoredImages"},
)
