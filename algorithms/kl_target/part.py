from agentrl.base.parts import Part

HERE = "agentrl.algorithms.kl_target"

PART = Part(
    name="kl-target",
    summary="A KL penalty that keeps the policy at a distance from the reference.",
    training={"reference.target_kl": f"{HERE}.training:join"},
)
