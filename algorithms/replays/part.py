from agentrl.base.parts import Part

HERE = "agentrl.algorithms.replays"

PART = Part(
    name="replays",
    summary="Branches of rollouts, for credit of calls, and counterfactuals, for credit of roles.",
    tables={
        "algorithm.branching": f"{HERE}.table:BranchingConfig",
        "algorithm.counterfactual": f"{HERE}.table:CounterfactualConfig",
    },
    training={"replays": f"{HERE}.training:join"},
    gateway={"replays": f"{HERE}.gateway:Replays"},
    libraries={f"{HERE}.coalitions": f"{HERE}.coalitions:difference"},
)
