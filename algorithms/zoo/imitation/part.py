from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.imitation"

PART = Part(
    name="zoo imitation",
    summary="Imitation of demonstrations, of the best rollouts, or of a teacher.",
    presets={
        "+distill": f"{HERE}.presets:with_teacher",
        "distill": f"{HERE}.presets:distill",
        "rft": f"{HERE}.presets:rft",
        "sft": f"{HERE}.presets:sft",
    },
)
