"""What users say about answers: as a reward of turns, as demonstrations and as a teacher."""

from agentrl.base.parts import Part

HERE = "agentrl.algorithms.feedback.presets"

PART = Part(
    name="user feedback",
    summary="What users say about answers: a reward of turns, demonstrations, a teacher.",
    needs=("preferences",),
    presets={
        "+corrections": f"{HERE}:with_corrections",
        "+self-distill": f"{HERE}:with_self_distillation",
    },
    added_rewards={
        "transition:told": f"{HERE}:add_told",
        "transition:turn": f"{HERE}:add_turns",
    },
)
