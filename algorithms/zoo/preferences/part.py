from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.preferences"

PART = Part(
    name="zoo preferences",
    summary="More losses of pairs.",
    presets={
        "+nll": f"{HERE}.presets:with_nll",
        "+pairs": f"{HERE}.pairs:with_pairs",
        "aot": f"{HERE}.presets:aot",
        "apo-down": f"{HERE}.presets:apo_down",
        "apo-zero": f"{HERE}.presets:apo_zero",
        "bco": f"{HERE}.presets:bco",
        "cdpo": f"{HERE}.presets:cdpo",
        "cpo": f"{HERE}.presets:cpo",
        "dpo": f"{HERE}.pairs:dpo",
        "exo": f"{HERE}.presets:exo",
        "hinge": f"{HERE}.presets:hinge",
        "ipo": f"{HERE}.presets:ipo",
        "kto": f"{HERE}.pairs:kto",
        "nca": f"{HERE}.presets:nca",
        "orpo": f"{HERE}.presets:orpo",
        "robust": f"{HERE}.presets:robust",
        "simpo": f"{HERE}.presets:simpo",
        "sppo": f"{HERE}.presets:sppo",
    },
)
