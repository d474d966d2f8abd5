"""What users say about answers: as a reward of turns, as demonstrations and as a teacher."""

from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.feedback"

PART = Part(
    name="zoo feedback",
    summary="What users say about answers: a reward of turns, demonstrations, a teacher.",
    needs=("preferences",),
    presets={
        "+corrections": f"{HERE}.demonstrations:with_corrections",
        "+self-distill": f"{HERE}.told:with_self_distillation",
    },
    added_rewards={
        "transition:told": f"{HERE}.told:add_told",
        "transition:turn": f"{HERE}.turns:add_turns",
    },
)
