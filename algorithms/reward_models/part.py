from agentrl.base.parts import Part

HERE = "agentrl.algorithms.reward_models"

PART = Part(
    name="reward model training",
    summary="Train reward models on data sets, and evaluate them.",
    uses=("data sets",),
    tables={"reward_model": f"{HERE}.table:RewardModelTraining"},
    commands={"rm": f"{HERE}.command:rm"},
)
