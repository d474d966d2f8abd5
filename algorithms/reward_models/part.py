from agentrl.base.parts import Part

HERE = "agentrl.algorithms.reward_models"

PART = Part(
    name="reward models",
    summary="Models whose scores are rewards, and their training on data sets.",
    uses=("preferences",),
    tables={
        "reward_model": f"{HERE}.table:RewardModelTraining",
        "reward_models": f"{HERE}.table:REWARD_MODELS",
    },
    commands={"rm": f"{HERE}.command:rm"},
    training={"reward_models": f"{HERE}.training:join"},
)
