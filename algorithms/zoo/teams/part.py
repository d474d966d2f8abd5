from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.teams"

PART = Part(
    name="zoo teams",
    summary="Credit and averages for teams and self-play.",
    needs=("credit blocks",),
    presets={
        "+ema": f"{HERE}.presets:with_ema",
        "+mean-by": f"{HERE}.presets:mean_by",
        "+call-discount": f"{HERE}.presets:call_discount",
        "+only": f"{HERE}.roles:only",
        "+per-role": f"{HERE}.roles:per_role",
        "at-grpo": f"{HERE}.presets:at_grpo",
        "difference": f"{HERE}.presets:difference",
        "dr-mas": f"{HERE}.roles:dr_mas",
        "magrpo": f"{HERE}.presets:magrpo",
        "maporl": f"{HERE}.presets:maporl",
        "marti": f"{HERE}.presets:marti",
        "sage": f"{HERE}.presets:sage",
        "shapley": f"{HERE}.presets:shapley",
        "spiral": f"{HERE}.presets:spiral",
    },
)
