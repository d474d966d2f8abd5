from agentrl.base.parts import Part

HERE = "agentrl.store.maintenance.command"

PART = Part(
    name="store-maintenance",
    summary="Commands that measure, prune, shrink and copy a store.",
    commands={
        "store backup": f"{HERE}:backup",
        "store prune": f"{HERE}:prune",
        "store stats": f"{HERE}:stats",
        "store vacuum": f"{HERE}:vacuum",
    },
)
