from agentrl.base.parts import Part

HERE = "agentrl.algorithms.preferences"

PART = Part(
    name="preferences",
    summary="Losses of pairs; pairs, labels and demonstrations in a store, and runs on them.",
    tables={"data": f"{HERE}.table:DataConfig"},
    commands={"data": f"{HERE}.command:data"},
    settles={"data": f"{HERE}.pin:pin_dataset"},
    presets={
        "+nll": f"{HERE}.losses:with_nll",
        "+pairs": f"{HERE}.pairs:with_pairs",
        "aot": f"{HERE}.losses:aot",
        "apo-down": f"{HERE}.losses:apo_down",
        "apo-zero": f"{HERE}.losses:apo_zero",
        "bco": f"{HERE}.losses:bco",
        "cdpo": f"{HERE}.losses:cdpo",
        "cpo": f"{HERE}.losses:cpo",
        "dpo": f"{HERE}.pairs:dpo",
        "exo": f"{HERE}.losses:exo",
        "hinge": f"{HERE}.losses:hinge",
        "ipo": f"{HERE}.losses:ipo",
        "kto": f"{HERE}.pairs:kto",
        "nca": f"{HERE}.losses:nca",
        "orpo": f"{HERE}.losses:orpo",
        "robust": f"{HERE}.losses:robust",
        "simpo": f"{HERE}.losses:simpo",
        "sppo": f"{HERE}.losses:sppo",
    },
    training={"data": f"{HERE}.training:join"},
)
