from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.trees"

PART = Part(
    name="zoo trees",
    summary="Credit of branching rollouts.",
    presets={
        "+tree": f"{HERE}.presets:with_tree",
        "c3": f"{HERE}.presets:c3",
        "tree-grpo": f"{HERE}.presets:tree_grpo",
        "treerl": f"{HERE}.presets:treerl",
        "vineppo": f"{HERE}.presets:vineppo",
    },
)
