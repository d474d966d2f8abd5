from agentrl.base.parts import Part

HERE = "agentrl.algorithms.replays"

PART = Part(
    name="replays",
    summary="Branches of rollouts, for credit of calls, and counterfactuals, for credit of roles.",
    tables={
        "algorithm.branching": f"{HERE}.table:BranchingConfig",
        "algorithm.counterfactual": f"{HERE}.table:CounterfactualConfig",
    },
    presets={
        "+tree": f"{HERE}.presets:with_tree",
        "c3": f"{HERE}.presets:c3",
        "tree-grpo": f"{HERE}.presets:tree_grpo",
        "treerl": f"{HERE}.presets:treerl",
        "vineppo": f"{HERE}.presets:vineppo",
    },
    training={"replays": f"{HERE}.training:join"},
    gateway={"replays": f"{HERE}.gateway:Replays"},
    libraries={f"{HERE}.coalitions": f"{HERE}.coalitions:difference"},
)
